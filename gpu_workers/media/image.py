"""Pictures: encoded bytes -> upright RGB pixels.

Only the formats in _FORMATS are ever tried. The size is read from the header and checked before anything is
decoded. EXIF orientation is applied, the first frame of an animation is taken, transparency is composited on
the background, palette, CMYK, gray and 16-bit pictures become 8-bit RGB. Pillow's messages go nowhere: they
contain addresses, and what they say is in the error code.
"""

import io
import struct
import warnings
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from gpu_workers.errors import ConfigurationError, ItemError
from shm.errors import ErrorCode

Background: TypeAlias = Literal["white", "black", "drop"]
RgbPixels: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)

# Importing a plugin registers its format; otherwise Pillow would load all forty on the first odd file.
_PLUGINS: Final = (
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
    TiffImagePlugin,
    BmpImagePlugin,
    AvifImagePlugin,
)
# An MPO (several JPEGs in one file) opens as JPEG.
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF")

# Beginnings (offset, bytes) of what we accept: a file that starts so and cannot be opened is damaged.
_ACCEPTED_MAGIC: Final = (
    (0, b"\xff\xd8\xff"),
    (0, b"\x89PNG\r\n\x1a\n"),
    (8, b"WEBP"),
    (0, b"GIF8"),
    (0, b"II*\0"),
    (0, b"MM\0*"),
    (0, b"BM"),
    (4, b"ftypavif"),
)
# Beginnings of pictures that we know and do not take.
_REFUSED_MAGIC: Final = (
    (4, b"ftyphei"),
    (4, b"ftyphev"),
    (4, b"ftypmif1"),
    (4, b"ftypmsf1"),
    (0, b"\0\0\0\x0cjP  "),
    (0, b"\xff\x4f\xff\x51"),
    (0, b"\xff\x0a"),
    (0, b"\0\0\0\x0cJXL "),
    (0, b"\0\0\x01\0"),
    (0, b"8BPS"),
    (0, b"<svg"),
)

_TRANSPOSE: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS: Final = (5, 6, 7, 8)
_PNG_CHUNK: Final = struct.Struct(">I4s")


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Of the upright picture, in pixels."""

    width: int
    height: int


def parse_background(name: str) -> Background:
    """The configuration's rgba_background. ConfigurationError for a name that is none."""
    for background in get_args(Background):
        if name == background:
            return cast(Background, background)
    raise ConfigurationError(f"unknown rgba_background {name!r}, known: {', '.join(get_args(Background))}")


class ImageReader:
    """Reads pictures under one policy. Any number of threads may use it at once."""

    def __init__(self, max_pixels: int, background: Background) -> None:
        """max_pixels: width x height of the largest picture. background: below transparent pixels; "drop"
        ignores transparency and shows whatever colour is stored under it."""
        # Pillow's own limit warns or raises without the numbers; ours is checked on every header instead.
        Image.MAX_IMAGE_PIXELS = None
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about damaged metadata, which we accept
        self._max_pixels = max_pixels
        self._background = background

    def size(self, data: memoryview) -> ImageSize:
        """From the header alone. ItemError if this is no picture that we take, or is too large."""
        with self._open(data) as image:
            width, height = image.size
            if image.format != "TIFF" and _orientation(image, data) in _SIDEWAYS:
                width, height = height, width
            return ImageSize(width, height)

    def rgb(self, data: memoryview) -> RgbPixels:
        """The pixels, (height, width, 3), read-only, of exactly size(data). ItemError for damage later on."""
        with self._open(data) as image:
            orientation = _orientation(image, data)
            _load(image)
            upright: Image.Image = image
            if image.format != "TIFF" and orientation in _TRANSPOSE:  # Pillow itself turns TIFFs upright
                upright = image.transpose(_TRANSPOSE[orientation])
            try:
                return np.asarray(self._to_rgb(upright))
            except (ValueError, OSError):  # a mode that Pillow cannot convert, such as LAB
                raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None

    def _open(self, data: memoryview) -> Image.Image:
        """Header read, size checked, nothing decoded. Copies the bytes: shared memory may change."""
        if len(data) == 0:
            raise ItemError(ErrorCode.EMPTY_ITEM)
        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - parsers of foreign bytes raise whatever comes to their mind
            raise ItemError(_why_not_opened(bytes(data[:32]))) from None
        width, height = image.size
        if width * height > self._max_pixels:
            raise ItemError(ErrorCode.TOO_MANY_PIXELS, width * height, self._max_pixels)
        if width < 1 or height < 1:
            raise ItemError(ErrorCode.DECODE_FAILED)
        return image

    def _to_rgb(self, image: Image.Image) -> Image.Image:
        """8-bit RGB of a decoded picture in any mode."""
        if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
            return _eight_bit(image).convert("RGB")
        if self._background == "drop" or not image.has_transparency_data:
            return image if image.mode == "RGB" else image.convert("RGB")  # which would copy
        below = Image.new("RGBA", image.size, self._background)
        return Image.alpha_composite(below, image.convert("RGBA")).convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit gray scaled to 8 bits; Pillow's own conversion clips everything above 255 to white."""
    samples = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
    return Image.fromarray(((samples + 128) // 257).astype(np.uint8))


def _load(image: Image.Image) -> None:
    """Decode the first frame. ItemError for damage: nothing half-decoded is ever used."""
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders of foreign bytes raise whatever comes to their mind
        truncated = isinstance(error, EOFError) or "truncated" in str(error)
        raise ItemError(ErrorCode.TRUNCATED if truncated else ErrorCode.DECODE_FAILED) from None


def _why_not_opened(head: bytes) -> ErrorCode:
    """From a file's first bytes: damaged, of a kind that we do not take, or no picture at all."""
    if any(head[offset : offset + len(magic)] == magic for offset, magic in _ACCEPTED_MAGIC):
        return ErrorCode.DECODE_FAILED
    if any(head[offset : offset + len(magic)] == magic for offset, magic in _REFUSED_MAGIC):
        return ErrorCode.UNSUPPORTED_FORMAT
    return ErrorCode.NOT_AN_IMAGE


def _orientation(image: Image.Image, data: memoryview) -> int:
    """EXIF orientation, 1 to 8, of an opened picture that need not be decoded; 1 where it is damaged."""
    try:
        if image.format == "PNG" and "exif" not in image.info:
            # Pillow would decode the whole picture to look for a chunk behind the pixels.
            image.info["exif"] = _png_exif(data)
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - damaged metadata, in any of many ways, must not fail the picture
        return 1
    return orientation if orientation in _TRANSPOSE else 1


def _png_exif(data: memoryview) -> bytes | None:
    """Content of a PNG's eXIf chunk, wherever it is."""
    position = 8
    while position + _PNG_CHUNK.size <= len(data):
        nbytes, kind = _PNG_CHUNK.unpack_from(data, position)
        position += _PNG_CHUNK.size
        if kind == b"eXIf":
            return b"Exif\0\0" + bytes(data[position : position + nbytes])
        position += nbytes + 4
    return None
