"""What is known of a video, and which of its frames were chosen.

Made by `video.VideoReader`, used by families: they give the rule and read the plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_workers.errors import ItemError
from gpu_workers.media.frame_table import FrameTable
from shm.errors import ErrorCode


@dataclass(slots=True)
class VideoMetadata:
    """Field for field Hugging Face's VideoMetadata: its samplers take this one as it is, and its processors
    take dataclasses.asdict of it as video_metadata. duration: seconds, frames / fps as in Hugging Face."""

    total_num_frames: int
    fps: float
    width: int
    height: int
    duration: float
    video_backend: str = "pyav"
    frames_indices: list[int] | None = None


# The chosen frames' display indices, ascending; one may come twice. ValueError, ZeroDivisionError: too few.
Choose: TypeAlias = Callable[[VideoMetadata], Sequence[int] | npt.NDArray[np.integer]]


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """max_pixels: of one frame. max_frames: chosen ones. min_frames: that a damaged video must still have.
    max_total_pixels: of all frames that `rgb` returns at once (three bytes each)."""

    max_pixels: int
    min_frames: int = 4
    max_frames: int = 768
    max_seconds: int = 600
    max_total_pixels: int = 2_000_000_000


@dataclass(frozen=True, slots=True)
class VideoProbe:
    """From the headers and the first frame (which alone carries the rotation). width, height: upright.

    frames: as the header claims, 0 where it does not say. duration_s: None where it does not say.
    """

    width: int
    height: int
    frames: int
    fps: float
    duration_s: float | None
    has_audio: bool


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """What was chosen. metadata.frames_indices: the chosen display indices; times_s: when each is shown, by
    its presentation time, from the first frame on (Hugging Face's timestamps are index / metadata.fps)."""

    metadata: VideoMetadata
    times_s: tuple[float, ...]
    table: FrameTable | None  # None: an animation or a list of pictures

    @property
    def indices(self) -> list[int]:
        """Of the chosen frames, ascending."""
        return self.metadata.frames_indices or []

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of what rgb returns."""
        return (len(self.indices), self.metadata.height, self.metadata.width, 3)


def chosen(metadata: VideoMetadata, choose: Choose) -> list[int]:
    """The family's choice, checked. The samplers' ways to say that frames are too few become one error."""
    total = metadata.total_num_frames
    if total == 1:
        return [0]
    try:
        indices = [int(index) for index in choose(replace(metadata))]
    except (ValueError, ZeroDivisionError):
        raise ItemError(ErrorCode.TOO_FEW_FRAMES, total) from None
    if not indices:
        raise ItemError(ErrorCode.TOO_FEW_FRAMES, total)
    if indices != sorted(indices) or indices[0] < 0 or indices[-1] >= total:
        raise ItemError(ErrorCode.INTERNAL)
    return indices


def upright_size(width: int, height: int, quarter_turns: int) -> tuple[int, int]:
    """(width, height) after so many quarter turns."""
    return (height, width) if quarter_turns % 2 else (width, height)
