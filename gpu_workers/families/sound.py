"""Sound of any family: decode, resample, measure. What the model does with the samples is its Ear.

The families' files bring the ears: ears.py has those of Whisper's descendants.
"""

import logging
import struct
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.composed import only_media
from gpu_workers.families.processed import out_of_range
from gpu_workers.families.processed_sound import FrameLayout, ProcessedSound
from gpu_workers.media.audio import AudioReader, Samples
from shm.errors import ErrorCode
from shm.messages import ItemAux

logger = logging.getLogger(__name__)

MAX_SECONDS: Final = 3600
_DEFAULT_RATE: Final = 16_000
_SAMPLE_SECONDS: Final = 1
# What measuring decoded is kept for preprocess up to this size (8 MB); longer sound is decoded again.
_KEPT_SAMPLES: Final = 2_000_000


class Ear(FrameLayout, Protocol):
    """How one model listens. Several threads use it at once, `forward` only one."""

    @property
    def dim(self) -> int:
        """Elements of a row."""

    @property
    def max_frames(self) -> int | None:
        """Mel frames of the longest sound that the tower takes; None: any length."""

    @property
    def min_samples(self) -> int:
        """Below this the feature extractor fails."""

    def frames(self, samples: int) -> int:
        """Mel frames, padding not counted, of so many samples."""

    def rows(self, frames: int) -> int:
        """Rows of so many mel frames."""

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """What the processor gives for this one sound."""

    def batch_key(self, frames: int) -> str:
        """Only sounds of the same key share a forward; empty: all of them do."""

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """Rows of each sound, in order."""


class Sounds:
    """A composed.Part."""

    def __init__(self, ear: Ear, rate: int) -> None:
        """rate: the model's, in Hz."""
        self._ear = ear
        self._rate = rate
        self._reader = AudioReader(MAX_SECONDS)
        self._min_samples = self._shortest()

    @property
    def dim(self) -> int:
        """The ear's."""
        return self._ear.dim

    def sample(self) -> MediaItem:
        """A second of silence."""
        return MediaItem("audio", (memoryview(silence(_SAMPLE_SECONDS * self._rate, self._rate)),))

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the header where it counts the samples, and of what is processed already."""
        if item.kind == "processed":
            return self._processed_plan(ProcessedSound(item.data, self._ear).frames)
        samples = self._reader.probe_audio(only_media(item), self._rate)
        return None if samples is None else self._plan(samples)

    def measure(self, item: MediaItem) -> ItemPlan:
        """By decoding."""
        samples = self._reader.samples(only_media(item), self._rate)
        return self._plan(len(samples), samples if len(samples) <= _KEPT_SAMPLES else None)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """The ear's features."""
        if item.kind == "processed":
            sound = ProcessedSound(item.data, self._ear)
            features = dict(sound.features())
            return Prepared(item.modality, plan, {**features}, self._ear.batch_key(sound.frames))
        samples: Any = plan.media_plan
        if samples is None:
            samples = self._reader.samples(item.data, self._rate)
        if [[self._ear.frames(len(samples))]] != plan.grids:
            raise ItemError(ErrorCode.INTERNAL)
        features = dict(self._ear.features(samples))
        return Prepared(item.modality, plan, features, self._ear.batch_key(self._ear.frames(len(samples))))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """The ear's rows."""
        with torch.inference_mode():
            return self._ear.forward(batch)

    def _processed_plan(self, frames: int) -> ItemPlan:
        if self._ear.rows(frames) < 1:
            raise out_of_range(self._ear.mask_name, frames, self._ear.frames(self._min_samples))
        return self._plan_of_frames(frames)

    def _plan(self, samples: int, decoded: Samples | None = None) -> ItemPlan:
        if samples < self._min_samples:
            raise ItemError(ErrorCode.TOO_SHORT, samples, self._min_samples)
        frames = self._ear.frames(samples)
        limit = self._ear.max_frames
        if limit is not None and frames > limit:
            limit_s = self._seconds_of_frames(limit)
            raise ItemError(ErrorCode.TOO_LONG, -(-samples // self._rate), limit_s)
        return self._plan_of_frames(frames, decoded)

    def _plan_of_frames(self, frames: int, decoded: Samples | None = None) -> ItemPlan:
        return ItemPlan(
            rows=self._ear.rows(frames),
            grids=[[frames]],
            width=0,
            height=0,
            cost_patches=frames,
            aux=ItemAux(audio_feature_length=frames),
            media_plan=decoded,
        )

    def _shortest(self) -> int:
        """Samples of the shortest sound that gives a row."""
        samples = self._ear.min_samples
        while self._ear.rows(self._ear.frames(samples)) < 1:
            samples += 1
        return samples

    def _seconds_of_frames(self, frames: int) -> int:
        frames_of_a_second = max(1, self._ear.frames(self._rate))
        return frames // frames_of_a_second


def choose_rate(options: Mapping[str, Any], extractor: Any, audio_config: Any) -> int:
    """The model's sampling rate in Hz: as configured, or the feature extractor's, or the config's.

    ConfigurationError if the daemon is told another one than the feature extractor has.
    """
    told, own = options.get("sampling_rate"), getattr(extractor, "sampling_rate", None)
    if told is not None and own is not None and told != own:
        raise ConfigurationError(f"--mm-process-config audio: sampling_rate {told}, the model has {own}")
    for rate in (told, own, getattr(audio_config, "sampling_rate", None)):
        if isinstance(rate, int) and rate > 0:
            return rate
    logger.warning("the checkpoint names no sampling rate: %d Hz it is", _DEFAULT_RATE)
    return _DEFAULT_RATE


def silence(samples: int, rate: int) -> bytes:
    """A WAV file of 16-bit zeros."""
    nbytes = 2 * samples
    return (
        struct.pack(
            "<4sI4s4sIHHIIHH", b"RIFF", 36 + nbytes, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16
        )
        + struct.pack("<4sI", b"data", nbytes)
        + bytes(nbytes)
    )
