"""What a model family is to the worker. One family is one file here and one line in registry.py.

A family knows the model: sizes from headers, preprocessing, the forward. It knows nothing of rings, blocks,
threads or devices' streams. `inspect`, `measure` and `preprocess` are called from several threads at once and
must not change the family; `forward` is called from the device thread only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shm.layout import Dtype
from shm.messages import ItemAux, ItemKind

if TYPE_CHECKING:  # torch is loaded by real towers only
    import torch

Rows: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"
Features: TypeAlias = "torch.Tensor | bytes"


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What a loaded family produces: rows of `dim` elements of `dtype`, for items of these modalities.

    other_dims: of the modalities whose rows have another width (no DeepStack columns, for one).
    """

    model_type: str
    modalities: tuple[str, ...]
    dim: int
    dtype: Dtype
    tower_bytes: int
    other_dims: Mapping[str, int] = field(default_factory=dict)

    def dim_of(self, modality: str) -> int:
        """Elements of a row of this modality."""
        return self.other_dims.get(modality, self.dim)


class MediaItem(msgspec.Struct, frozen=True):
    """One item as it came: read-only bytes in the input arena, valid until its ticket has ended.

    files: the one file of kind "media" or "processed", or the pictures of kind "frames" or "chunk", at least
    one, none of them empty. options: the item's own processor options, unchecked, values as JSON has them.
    """

    modality: str
    files: tuple[memoryview, ...]
    kind: ItemKind = "media"
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def data(self) -> memoryview:
        """The first file, which is the only one unless kind is "frames" or "chunk"."""
        return self.files[0]


class ItemPlan(msgspec.Struct, frozen=True):
    """What an item will become, before its preprocessing.

    rows: embeddings. grids: [[t, h, w], ...] in patches. width, height: of the upright picture or of one
    frame, in pixels. cost_patches: what the forward costs, in the unit of max_batch_patches. aux: what the
    language model needs beside the rows. media_plan: what the media's reader found out about the file, for
    preprocess to go on from; only the family knows its type. prepares_at_once: preprocessing costs less than
    its hand-over to another thread would.
    """

    rows: int
    grids: list[list[int]]
    width: int
    height: int
    cost_patches: int
    fault: str = ""  # tests only: the fault point this item asks for (stub tower)
    aux: ItemAux = ItemAux()
    media_plan: object = None
    prepares_at_once: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """An item ready for the device: the processor's outputs by the name of the tower's argument.

    batch_key: only items of the same key share a forward; empty means that the modality is the key.
    """

    modality: str
    plan: ItemPlan
    features: dict[str, Features] = msgspec.field(default_factory=dict)
    batch_key: str = ""


class Family(Protocol):
    """One loaded model family."""

    def info(self) -> FamilyInfo:
        """Does not change while the worker lives."""

    def samples(self) -> list[MediaItem]:
        """A small valid item of each modality, for the warm-up."""

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Sizes from the headers, no decode: intake waits for it. None if only measure can tell.

        ItemError if the item cannot be encoded.
        """

    def measure(self, item: MediaItem) -> ItemPlan:
        """Sizes of an item that inspect could not tell, by reading or decoding as much as it takes.

        Called on a preprocess thread, only after inspect gave None. ItemError as for inspect.
        """

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """Decode and run the processor. ItemError if the item cannot be decoded or is not as planned."""

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """Rows (plan.rows, dim) of each item, in order. All have one batch key. May raise anything."""
