"""Already processed sound: mel frames and their mask as the model's processor gives them, checked.

The processor pads, and may have padded for a batch; what a sound alone would not have is cut off, so the rows
are those of the same sound sent raw.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from gpu_workers.families.processed import TensorFile, out_of_range, wrong_size

FEATURES: Final = "input_features"  # (windows, mel bins, frames), or as FrameLayout.feature_sizes says
MASK: Final = "attention_mask"  # (windows, frames)
_LENGTHS: Final = "audio_feature_lengths"


class FrameLayout(Protocol):
    """How one model's processor lays out a sound; see sound.Ear."""

    @property
    def mask_name(self) -> str:
        """What the processor calls the mask."""

    @property
    def feature_sizes(self) -> Sequence[int | None]:
        """(windows, mel bins, frames), None for what differs from sound to sound."""

    @property
    def frame_axis(self) -> int:
        """Which of feature_sizes are the frames."""

    def kept_frames(self, valid: int) -> int:
        """Frames of a window that the tower wants where so many are sound."""


class ProcessedSound:
    """One sound out of a safetensors file. ItemError for one that the model's processor cannot have made."""

    def __init__(self, data: memoryview, layout: FrameLayout) -> None:
        """Reads the mask, which is small, and of the features only the shape."""
        self._file = TensorFile(data)
        self._layout = layout
        self._sizes = self._file.float_sizes(FEATURES, layout.feature_sizes)
        self._mask = self._read_mask()
        lengths = self._mask.sum(-1)
        self.frames = int(lengths.sum())
        self._check_windows(lengths.tolist())
        self._kept = layout.kept_frames(int(lengths[-1]))
        if self._sizes[layout.frame_axis] < self._kept:
            raise wrong_size(FEATURES, layout.frame_axis, self._sizes[layout.frame_axis], self._kept)

    def features(self) -> dict[str, torch.Tensor]:
        """What the processor gives for this sound alone."""
        features = self._file.floats(FEATURES, self._sizes)
        return {
            FEATURES: features.narrow(self._layout.frame_axis, 0, self._kept),
            MASK: self._mask[:, : self._kept],
        }

    def _read_mask(self) -> torch.Tensor:
        """Ones, then zeros."""
        windows, frames = self._sizes[0], self._sizes[self._layout.frame_axis]
        if _LENGTHS in self._file and self._layout.mask_name not in self._file:
            lengths = self._file.integers(_LENGTHS, (windows,), most=frames)
            return (torch.arange(frames)[None] < lengths[:, None]).to(torch.int32)
        name = self._layout.mask_name
        mask = self._file.integers(name, (windows, frames), least=0, most=1).to(torch.int32)
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise out_of_range(name, found=1, limit=0)
        return mask

    def _check_windows(self, lengths: list[int]) -> None:
        """Every window but the last is full, and the last is not empty."""
        whole = self._sizes[self._layout.frame_axis]
        for found in lengths[:-1]:
            if found != whole:
                raise wrong_size(self._layout.mask_name, 1, found, whole)
        if lengths[-1] == 0:
            raise wrong_size(self._layout.mask_name, 1, 0, 1)
