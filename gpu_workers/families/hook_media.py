"""Media as preprocess_mm_for_encoder takes them: pictures and sound loaded, videos as files, checked."""

import io
import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

import av
import numpy as np
import soundfile
from transformers import PreTrainedModel

from gpu_workers.errors import ItemError
from gpu_workers.families.base import MediaItem
from gpu_workers.families.composed import only_media
from gpu_workers.families.own_pictures import LoadedPictures, refuse_options
from gpu_workers.families.patches import check_aspect_ratio
from gpu_workers.families.plain_pictures import picture_sample
from gpu_workers.families.qwen_pictures import PROCESSOR_MAX_ASPECT_RATIO
from gpu_workers.media.audio import AudioReader
from gpu_workers.media.image import parse_background
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)

_MAX_SECONDS: Final = 3600
_SAMPLE_SIDE: Final = 112
_SAMPLE_FPS: Final = 4
_SAMPLE_FRAMES: Final = 8
_SAMPLE_RATE: Final = 16_000
_DEFAULT_RATE: Final = 16_000
# Of models whose config names no rate.
_RATES: Final = {"mimo_v2": 24_000}
_RATE_NAMES: Final = ("audio_sampling_rate", "sampling_rate", "sample_rate")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the hook gets for one item. width, height: pixels, 0 for sound. length: of the file or sound."""

    values: list[Any]
    width: int
    height: int
    length: int


class Loader(Protocol):
    """One modality. Any number of threads may use it."""

    def sample(self) -> MediaItem:
        """A small valid item."""

    def check(self, item: MediaItem) -> None:
        """By the header alone. ItemError."""

    def load(self, item: MediaItem) -> Loaded:
        """ItemError."""


class PictureLoader:
    """Pictures, several in one item too, as Pillow has them."""

    def __init__(self, config: WorkerConfig) -> None:
        self._pictures = LoadedPictures(config)

    def sample(self) -> MediaItem:
        """A gray square."""
        return picture_sample()

    def check(self, item: MediaItem) -> None:
        """Kind, options, sizes."""
        if item.kind == "processed":
            raise ItemError(ErrorCode.KIND_UNSUPPORTED)
        refuse_options(item)
        for file in item.files:
            self._pictures.size(file)

    def load(self, item: MediaItem) -> Loaded:
        """Upright, RGB."""
        self.check(item)
        pictures = [self._pictures.picture(file) for file in item.files]
        return Loaded(pictures, *pictures[0].size, length=len(pictures))


class SoundLoader:
    """Sound at the model's rate, mono."""

    def __init__(self, config: WorkerConfig, model: PreTrainedModel) -> None:
        self._rate = sampling_rate(model.config, config.media_options.audio)
        self._reader = AudioReader(_MAX_SECONDS)

    def sample(self) -> MediaItem:
        """A second of silence."""
        return MediaItem("audio", (memoryview(_silent_second(self._rate)),))

    def check(self, item: MediaItem) -> None:
        """What the header says."""
        self._reader.probe_audio(only_media(item), self._rate)

    def load(self, item: MediaItem) -> Loaded:
        """float32."""
        samples = self._reader.samples(only_media(item), self._rate)
        return Loaded([samples], 0, 0, length=len(samples))


class VideoLoader:
    """Whole files, of which at least the first frame decodes."""

    def __init__(self, config: WorkerConfig) -> None:
        self._limits = VideoLimits(config.max_pixels)
        self._reader = VideoReader(self._limits, parse_background(config.rgba_background), decode_threads=1)
        self._max_aspect_ratio = min(config.max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)

    def sample(self) -> MediaItem:
        """Two seconds of gray, with silence."""
        return MediaItem("video", (memoryview(_gray_film()),))

    def check(self, item: MediaItem) -> None:
        """Kind and options; a first frame is decoded when it is loaded."""
        only_media(item)
        refuse_options(item)

    def load(self, item: MediaItem) -> Loaded:
        """The bytes."""
        self.check(item)
        probe = self._reader.probe(item.data)
        check_aspect_ratio(probe.width, probe.height, self._max_aspect_ratio)
        if probe.duration_s is not None and probe.duration_s > self._limits.max_seconds:
            raise ItemError(ErrorCode.TOO_LONG, math.ceil(probe.duration_s), self._limits.max_seconds)
        return Loaded([bytes(item.data)], probe.width, probe.height, length=len(item.data))


def sampling_rate(described: Any, options: dict[str, Any]) -> int:
    """Of a model's sound, in Hz: as the daemon is told, or by the sections of its config, or as known."""
    sections = (getattr(described, name, None) for name in ("processor_config", "audio_config"))
    for section in (options, *sections):
        values = section if isinstance(section, dict) else vars(section) if section is not None else {}
        for name in _RATE_NAMES:
            rate = values.get(name)
            if isinstance(rate, int) and rate > 0:
                return rate
    if described.model_type in _RATES:
        return _RATES[described.model_type]
    logger.warning("the checkpoint names no sampling rate: %d Hz it is", _DEFAULT_RATE)
    return _DEFAULT_RATE


def _silent_second(rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(rate, np.float32), rate, format="WAV")
    return file.getvalue()


def _gray_film() -> bytes:
    """An MP4 of MPEG-4 and AAC, which FFmpeg always has."""
    file = io.BytesIO()
    gray = np.full((_SAMPLE_SIDE, _SAMPLE_SIDE, 3), 128, np.uint8)
    silent = np.zeros((1, _SAMPLE_RATE * _SAMPLE_FRAMES // _SAMPLE_FPS), np.float32)
    with av.open(file, "w", format="mp4") as container:
        film: Any = container.add_stream("mpeg4", rate=_SAMPLE_FPS)
        film.width = film.height = _SAMPLE_SIDE
        film.pix_fmt = "yuv420p"
        film.codec_context.thread_count = 1
        track: Any = container.add_stream("aac", rate=_SAMPLE_RATE, layout="mono")
        for place in range(_SAMPLE_FRAMES):
            frame = av.VideoFrame.from_ndarray(gray, format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, _SAMPLE_FPS)
            container.mux(film.encode(frame))
        container.mux(film.encode(None))
        sound = av.AudioFrame.from_ndarray(silent, format="fltp", layout="mono")
        sound.sample_rate, sound.pts = _SAMPLE_RATE, 0
        container.mux(track.encode(sound))
        container.mux(track.encode(None))
    return file.getvalue()
