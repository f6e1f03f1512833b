"""Animated GIF and WebP as videos, read by Pillow.

Called by `video`. Frames and their times are found by walking the file's blocks, which decodes nothing. A
frame without a delay, or with one that no browser keeps to, is shown for a tenth of a second, as there.
"""

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from PIL import GifImagePlugin, Image, WebPImagePlugin

from gpu_workers.errors import ItemError
from gpu_workers.media.image import Background, RgbPixels
from shm.errors import ErrorCode

# Importing a plugin registers its format.
_PLUGINS: Final = (GifImagePlugin, WebPImagePlugin)
_GIF_MAGIC: Final = (b"GIF87a", b"GIF89a")
_SHORTEST_DELAY_MS: Final = 20
_DEFAULT_DELAY_MS: Final = 100
_GIF_HEADER_BYTES: Final = 13
_GIF_EXTENSION, _GIF_IMAGE, _GIF_END, _GIF_CONTROL = 0x21, 0x2C, 0x3B, 0xF9
_RIFF_CHUNK: Final = struct.Struct("<4sI")
_WEBP_HEADER_BYTES: Final = 12
_WEBP_DELAY_OFFSET: Final = 12  # in an ANMF chunk: x, y, width, height, 24 bits each, come first


def is_animation(data: memoryview) -> bool:
    """By content: a GIF or WebP, moving or not."""
    head = bytes(data[:12])
    return head[:6] in _GIF_MAGIC or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


class Animation:
    """One opened animation. Not for several threads."""

    def __init__(self, data: memoryview, max_pixels: int) -> None:
        """ItemError if it cannot be opened, is too large or holds no whole frame."""
        try:
            image = Image.open(io.BytesIO(data), formats=("GIF", "WEBP"))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - parsers of foreign bytes raise whatever comes to their mind
            raise ItemError(ErrorCode.DECODE_FAILED) from None
        self._image = image
        self.width, self.height = image.size
        if self.width * self.height > max_pixels:
            raise ItemError(ErrorCode.TOO_MANY_PIXELS, self.width * self.height, max_pixels)
        walk = _gif_delays if image.format == "GIF" else _webp_delays
        delays_ms, self.damaged = walk(data)
        if not delays_ms:
            raise ItemError(ErrorCode.TRUNCATED if self.damaged else ErrorCode.DECODE_FAILED)
        kept_ms = [delay if delay >= _SHORTEST_DELAY_MS else _DEFAULT_DELAY_MS for delay in delays_ms]
        ends_ms = np.cumsum(kept_ms).tolist()
        self.times_s = tuple(milliseconds / 1000 for milliseconds in [0, *ends_ms[:-1]])
        self.duration_s: float = ends_ms[-1] / 1000
        self.fps = Fraction(1000 * len(kept_ms), ends_ms[-1])

    def frames(self, indices: Sequence[int], background: Background) -> Iterator[tuple[int, RgbPixels]]:
        """(index, pixels (height, width, 3)) of the wanted frames, ascending. ItemError for damage."""
        wanted = set(indices)
        for index in range(max(wanted) + 1):
            try:
                self._image.seek(index)
                self._image.load()
                if index in wanted:
                    yield index, _flattened(self._image, background)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - decoders of foreign bytes raise whatever comes to their mind
                raise ItemError(ErrorCode.DECODE_FAILED) from None


def _flattened(image: Image.Image, background: Background) -> RgbPixels:
    if background == "drop" or not image.has_transparency_data:
        return np.array(image.convert("RGB"))
    below = Image.new("RGBA", image.size, background)
    return np.array(Image.alpha_composite(below, image.convert("RGBA")).convert("RGB"))


def _gif_delays(data: memoryview) -> tuple[list[int], bool]:
    """Milliseconds of every whole frame, and whether the file ends within one."""
    delays_ms: list[int] = []
    delay_ms = 0
    position = _GIF_HEADER_BYTES + _colour_table_bytes(data[10])
    try:
        while data[position] != _GIF_END:
            if data[position] == _GIF_IMAGE:
                position = _after_sub_blocks(data, position + 11 + _colour_table_bytes(data[position + 9]))
                delays_ms.append(delay_ms)
                delay_ms = 0
            elif data[position] == _GIF_EXTENSION:
                if data[position + 1] == _GIF_CONTROL:
                    delay_ms = 10 * int.from_bytes(data[position + 4 : position + 6], "little")
                position = _after_sub_blocks(data, position + 2)
            else:
                return delays_ms, True
    except IndexError:
        return delays_ms, True
    return delays_ms, False


def _colour_table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_sub_blocks(data: memoryview, position: int) -> int:
    """Behind a chain of sub-blocks, each a length and as many bytes, ended by length 0."""
    while data[position]:
        position += data[position] + 1
    return position + 1


def _webp_delays(data: memoryview) -> tuple[list[int], bool]:
    """Milliseconds of every whole frame, and whether the file ends within one. A still WebP is one frame."""
    delays_ms: list[int] = []
    position = _WEBP_HEADER_BYTES
    while position + _RIFF_CHUNK.size <= len(data):
        kind, nbytes = _RIFF_CHUNK.unpack_from(data, position)
        content = position + _RIFF_CHUNK.size
        position = content + nbytes + nbytes % 2
        if content + nbytes > len(data):
            return delays_ms, True
        if kind == b"ANMF":
            start = content + _WEBP_DELAY_OFFSET
            delays_ms.append(int.from_bytes(data[start : start + 3], "little"))
        elif kind in (b"VP8 ", b"VP8L"):
            delays_ms.append(0)
    return delays_ms, False
