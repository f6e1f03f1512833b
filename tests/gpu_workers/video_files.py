"""Small videos whose every frame shows its own number, made with PyAV, and sound to go with them."""

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt

BITS = 10
WIDTH, HEIGHT = 80, 48


def numbered(number: int, width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.uint8]:
    """A picture of ten bars, dark or light: the bits of number."""
    bits = [(number >> bit) & 1 for bit in range(BITS)]
    row = np.repeat(np.array(bits, np.uint8) * 180 + 30, -(-width // BITS))[:width]
    return np.ascontiguousarray(np.broadcast_to(row[None, :, None], (height, width, 3)))


def number_of(rgb: npt.NDArray[np.uint8]) -> int:
    """What numbered was given, whatever a codec made of it."""
    bars = np.array_split(rgb[rgb.shape[0] // 4 : -rgb.shape[0] // 4].astype(float), BITS, axis=1)
    return sum(
        int(bar[:, bar.shape[1] // 4 : -bar.shape[1] // 4].mean() > 120) << bit
        for bit, bar in enumerate(bars)
    )


def encode(
    numbers: Sequence[int],
    *,
    codec: str = "libx264",
    container: str = "mp4",
    fps: int = 10,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    options: Mapping[str, str] | None = None,
    sound: npt.NDArray[np.float32] | None = None,
    pixel_format: str = "yuv420p",
    rotation: int = 0,
) -> memoryview:
    """A whole file. sound: (channels, samples) at 16 kHz, as AAC. rotation: degrees in the display matrix."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=fps, options=dict(options or {}))
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.codec_context.thread_count = 1
        if rotation:
            stream.set_display_rotation(rotation)
        track: Any = None
        if sound is not None:
            layout = "stereo" if len(sound) == 2 else "mono"
            track = output.add_stream("aac", rate=16000, layout=layout)
        for place, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
            samples.sample_rate, samples.pts = 16000, 0
            output.mux(track.encode(samples))
            output.mux(track.encode(None))
    return memoryview(file.getvalue())
