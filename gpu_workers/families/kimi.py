"""Kimi K2.5: a request for pictures may have chunks of videos among them, encoded as videos are."""

import msgspec
import torch

from gpu_workers.families import plain
from gpu_workers.families.base import Family, FamilyInfo, ItemPlan, MediaItem, Prepared, Rows
from shm.messages import WorkerConfig


def load(config: WorkerConfig, device: torch.device, model_type: str) -> Family:
    """Load the checkpoint's tower and processors. ConfigurationError for one that cannot work."""
    return WithChunks(plain.load(config, device, model_type))


class WithChunks:
    """A family whose pictures and videos have rows of one width."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def info(self) -> FamilyInfo:
        """The family's."""
        return self._family.info()

    def samples(self) -> list[MediaItem]:
        """The family's."""
        return self._family.samples()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """A chunk as the list of frames that it is."""
        return self._family.inspect(_as_video(item))

    def measure(self, item: MediaItem) -> ItemPlan:
        """As inspect."""
        return self._family.measure(_as_video(item))

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """As inspect. Its batch key sets a chunk apart from the pictures of its request."""
        prepared = self._family.preprocess(_as_video(item), plan)
        return msgspec.structs.replace(prepared, batch_key=prepared.batch_key or prepared.modality)

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """The family's."""
        return self._family.forward(batch)


def _as_video(item: MediaItem) -> MediaItem:
    if item.kind != "chunk":
        return item
    return MediaItem("video", item.files, "frames", item.options)
