"""A family put together from one part for each modality. Used by the files that load a checkpoint.

A part knows one modality of one model. A checkpoint that lacks the processor of a modality simply has no part
for it: the others are served.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import FamilyInfo, ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.towers import payload_dtype, tower_bytes
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)


class Part(Protocol):
    """What families.base.Family is, for one modality. Several threads use it at once, forward only one."""

    @property
    def dim(self) -> int:
        """Elements of a row."""

    def sample(self) -> MediaItem:
        """A small valid item, for the warm-up."""

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Sizes from the headers; None if only measure can tell. ItemError."""

    def measure(self, item: MediaItem) -> ItemPlan:
        """Sizes by reading as much as it takes. ItemError."""

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """What the tower takes. ItemError."""

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """Rows (plan.rows, dim) of each item, in order."""


class ComposedFamily:
    """A families.base.Family that hands every item to the part of its modality."""

    def __init__(self, info: FamilyInfo, parts: Mapping[str, Part]) -> None:
        """info: as the family's file made it. parts: by modality, at least one."""
        self._info = info
        self._parts = parts

    def info(self) -> FamilyInfo:
        """Does not change."""
        return self._info

    def samples(self) -> list[MediaItem]:
        """One of each part."""
        return [part.sample() for part in self._parts.values()]

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """By the item's part. Only a family that looks at it before (kimi) takes a chunk."""
        if item.kind == "chunk":
            raise ItemError(ErrorCode.KIND_UNSUPPORTED)
        return self._part(item.modality).inspect(item)

    def measure(self, item: MediaItem) -> ItemPlan:
        """By the item's part."""
        return self._part(item.modality).measure(item)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """By the item's part."""
        return self._part(item.modality).preprocess(item, plan)

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """By the batch's part: all items have one modality, because each part sets its own batch keys."""
        return self._part(batch[0].modality).forward(batch)

    def _part(self, modality: str) -> Part:
        part = self._parts.get(modality)
        if part is None:
            raise ItemError(ErrorCode.MODALITY_UNSUPPORTED)
        return part


def load_parts(loaders: Mapping[str, Callable[[], Part]]) -> dict[str, Part]:
    """The parts of the modalities whose processors the checkpoint has; logs which it lacks.

    loaders raise OSError or ValueError for a processor that is not there (as transformers does).
    ConfigurationError if nothing is left.
    """
    parts: dict[str, Part] = {}
    reasons: list[str] = []
    for modality, loader in loaders.items():
        try:
            parts[modality] = loader()
        except (OSError, ValueError) as error:
            reason = f"the checkpoint has no {modality} processor: {_first_line(error)}"
            logger.warning("%s is not served: %s", modality, reason)
            reasons.append(reason)
    if not parts:
        raise ConfigurationError("; ".join(reasons))
    return parts


def compose(
    model: PreTrainedModel, model_type: str, loaders: Mapping[str, Callable[[], Part]]
) -> ComposedFamily:
    """The family of a loaded model: see load_parts. Rows of narrower modalities keep their width."""
    parts = load_parts(loaders)
    widest = max(part.dim for part in parts.values())
    info = FamilyInfo(
        model_type=model_type,
        modalities=tuple(parts),
        dim=widest,
        dtype=payload_dtype(model.dtype),
        tower_bytes=tower_bytes(model),
        other_dims={modality: part.dim for modality, part in parts.items() if part.dim != widest},
    )
    return ComposedFamily(info, parts)


def only_media(item: MediaItem) -> memoryview:
    """The one file of an item that must be one. ItemError(KIND_UNSUPPORTED) for any other kind."""
    if item.kind != "media":
        raise ItemError(ErrorCode.KIND_UNSUPPORTED)
    return item.data


def tensors_of(batch: Sequence[Prepared], name: str) -> list[torch.Tensor]:
    """The feature of this name of each item."""
    features = [prepared.features[name] for prepared in batch]
    return [feature for feature in features if not isinstance(feature, bytes)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
