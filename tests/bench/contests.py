"""What tests.bench.preprocess races: Contest, and those of videos and sounds.

Theirs is what a script does that hands decoded frames or samples to Hugging Face's processor: PyAV for the
frames that the processor's own rule takes, soundfile and soxr for samples. Ours is what the worker does.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
import torch
import transformers

from gpu_workers.media.audio import AudioReader
from gpu_workers.media.pixels import Pixels, open_pixels
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits, VideoMetadata
from tests.bench.photographs import photograph

_MAX_PIXELS: Final = 33_500_000
_FPS: Final = 30
# (width, height), frames in the file: two a second are sampled.
VIDEOS: Final = {"640x360, 10 s": ((640, 360), 300), "720p, 4 s": ((1280, 720), 120)}
_RATE: Final = 16_000
# Channels, rate in the file, seconds.
SOUNDS: Final = {"16 kHz, 30 s": (1, 16_000, 30), "44.1 kHz stereo, 30 s": (2, 44_100, 30)}


@dataclass(frozen=True)
class Contest:
    """Two ways to the same tensor. A call does `amount` units: pictures, video frames, seconds of audio."""

    name: str
    unit: str
    amount: float
    theirs: Callable[[], torch.Tensor]
    ours: Callable[[], torch.Tensor]
    target: float | None  # times as fast on one core

    def check(self) -> None:
        """Both sides once, which also warms them up. AssertionError if they do not agree in every bit."""
        theirs, ours = self.theirs(), self.ours()
        assert theirs.dtype == ours.dtype, f"{self.name}: {theirs.dtype} and {ours.dtype}"
        assert torch.equal(theirs, ours), f"{self.name}: the values differ"


# --- videos ---


def video_contests() -> Iterator[Contest]:
    """H.264 in MP4 -> pixel_values_videos; the unit is a sampled frame."""
    processor = transformers.Qwen2VLVideoProcessor(fps=2.0, cap_pixels_per_frame=False)
    pixels = open_pixels(processor, dtype=torch.float32, device=torch.device("cpu"))
    reader = VideoReader(VideoLimits(_MAX_PIXELS), "white", decode_threads=1)
    for name, (size, count) in VIDEOS.items():
        data = _h264(*size, count)
        chosen = len(reader.plan(memoryview(data), partial(_choose, processor)).indices)
        yield Contest(
            name=f"Qwen2.5-VL video {name}",
            unit="sampled frame",
            amount=chosen,
            theirs=partial(_video_by_hugging_face, processor, data, count),
            ours=partial(_video_by_us, processor, pixels, reader, data),
            target=None,
        )


def _h264(width: int, height: int, count: int) -> bytes:
    """A photograph that wanders, a keyframe every second."""
    wide = av.VideoFrame.from_image(_picture(width + count, height)).to_ndarray(format="rgb24")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=_FPS, options={"g": str(_FPS), "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(count):
            moved = np.ascontiguousarray(wide[:, number : number + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def _picture(width: int, height: int) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(photograph(width, height, seed=1))).convert("RGB")


def _choose(processor: Any, metadata: VideoMetadata) -> npt.NDArray[np.integer]:
    indices = processor.sample_frames(
        metadata=metadata,
        temporal_patch_size=processor.temporal_patch_size,
        min_frames=processor.min_frames,
        max_frames=processor.max_frames,
        num_frames=processor.num_frames,
        fps=processor.fps,
    )
    return np.asarray(indices)


def _video_by_hugging_face(processor: Any, data: bytes, count: int) -> torch.Tensor:
    """As transformers' own PyAV reader: every frame is decoded, the sampled ones are converted."""
    metadata = VideoMetadata(count, float(_FPS), 0, 0, count / _FPS)
    wanted = set(_choose(processor, metadata).tolist())
    with av.open(io.BytesIO(data)) as container:
        frames = [
            frame.to_ndarray(format="rgb24")
            for index, frame in enumerate(container.decode(video=0))
            if index in wanted
        ]
    values: torch.Tensor = processor(
        videos=[np.stack(frames)],
        do_sample_frames=False,
        video_metadata=[asdict(metadata)],
        return_tensors="pt",
    )["pixel_values_videos"]
    return values


def _video_by_us(processor: Any, pixels: Pixels, reader: VideoReader, data: bytes) -> torch.Tensor:
    """What the worker does with a video, the search for its frames included."""
    plan = reader.plan(memoryview(data), partial(_choose, processor))
    frames, height, width, _ = plan.shape
    resized = processor.resize(
        torch.empty((1, frames, 3, height, width), dtype=torch.uint8, device="meta"),
        size=processor.size,
        resample=processor.resample,
        factor=processor.patch_size * processor.merge_size,
        temporal_factor=processor.temporal_patch_size,
        cap_pixels_per_frame=processor.cap_pixels_per_frame,
    )
    each = reader.each(memoryview(data), plan)
    return pixels.pixel_values_of(each, frames, resized.shape[-2], resized.shape[-1])


# --- sounds ---


def sound_contests() -> Iterator[Contest]:
    """16-bit WAV -> input_features; the unit is a second."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    reader = AudioReader(max_seconds=600)
    for name, (channels, rate, seconds) in SOUNDS.items():
        data = _wav(channels, rate, seconds)
        yield Contest(
            name=f"Whisper's mel spectrogram, {name}",
            unit="second",
            amount=seconds,
            theirs=partial(_sound_by_hugging_face, extractor, data),
            ours=partial(_sound_by_us, extractor, reader, data),
            target=None,
        )


def _wav(channels: int, rate: int, seconds: int) -> bytes:
    file = io.BytesIO()
    samples = np.random.default_rng(rate).normal(0, 0.1, (rate * seconds, channels))
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _sound_by_hugging_face(extractor: Any, data: bytes) -> torch.Tensor:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    return _features(extractor, mono if rate == _RATE else soxr.resample(mono, rate, _RATE))


def _sound_by_us(extractor: Any, reader: AudioReader, data: bytes) -> torch.Tensor:
    """What the worker does with a sound: the spectrogram is Hugging Face's own."""
    return _features(extractor, reader.samples(memoryview(data), _RATE))


def _features(extractor: Any, samples: npt.NDArray[np.float32]) -> torch.Tensor:
    values: torch.Tensor = extractor(
        [samples], sampling_rate=_RATE, return_tensors="pt", truncation=False, padding="max_length"
    )["input_features"]
    return values
