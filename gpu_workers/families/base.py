"""What a model family is to the worker. One family is one file here and one line in registry.py.

A family knows the model: sizes from headers, preprocessing, the forward. It knows nothing of rings, blocks,
threads or devices' streams. `inspect` and `preprocess` are called from several threads at once and must not
change the family; `forward` is called from the device thread only.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shm.layout import Dtype

if TYPE_CHECKING:  # torch is loaded by real towers only
    import torch

Rows: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"
Features: TypeAlias = "torch.Tensor | bytes"


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What a loaded family produces: rows of `dim` elements of `dtype`, for items of these modalities."""

    model_type: str
    modalities: tuple[str, ...]
    dim: int
    dtype: Dtype
    tower_bytes: int


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What an item will become, known from its header: no decode has happened.

    rows: embeddings. grids: [[t, h, w], ...] in patches. width, height: of the upright picture, in pixels.
    cost_patches: what the forward costs, in the unit of max_batch_patches.
    """

    rows: int
    grids: list[list[int]]
    width: int
    height: int
    cost_patches: int
    fault: str = ""  # tests only: the fault point this item asks for (stub tower)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item ready for the device: the processor's outputs by the name of the tower's argument."""

    modality: str
    plan: ItemPlan
    features: dict[str, Features] = field(default_factory=dict)


class Family(Protocol):
    """One loaded model family."""

    def info(self) -> FamilyInfo:
        """Does not change while the worker lives."""

    def sample(self) -> tuple[str, bytes]:
        """(modality, data) of a small valid item, for the warm-up."""

    def inspect(self, modality: str, data: memoryview) -> ItemPlan:
        """Sizes from the header. ItemError if the item cannot be encoded."""

    def preprocess(self, modality: str, data: memoryview, plan: ItemPlan) -> Prepared:
        """Decode and run the processor. ItemError if the item cannot be decoded or is not as planned."""

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """Rows (plan.rows, dim) of each item, in order. All have one modality. May raise anything."""
