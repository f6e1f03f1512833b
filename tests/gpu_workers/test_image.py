"""The image loader on pictures made here: what the recorded cases do not cover."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.media.image import ImageReader, ImageSize, parse_background
from shm.errors import ErrorCode

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "MPO")


def noise(height: int, width: int, channels: int = 3) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(pixels: npt.NDArray[Any], file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, file_format, **options)
    return file.getvalue()


def reader(max_pixels: int = 1_000_000) -> ImageReader:
    return ImageReader(max_pixels, "white")


def refusal(data: bytes, max_pixels: int = 1_000_000) -> ItemError:
    with pytest.raises(ItemError) as caught:
        reader(max_pixels).rgb(memoryview(data))
    return caught.value


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_accepted_format_is_read(file_format: str) -> None:
    data = memoryview(encoded(noise(20, 30), file_format))
    assert reader().size(data) == ImageSize(30, 20)
    assert reader().rgb(data).shape == (20, 30, 3)


@pytest.mark.parametrize("file_format", ["ICO", "JPEG2000", "PPM", "TGA"])
def test_a_format_that_pillow_knows_and_we_do_not_take_is_refused(file_format: str) -> None:
    error = refusal(encoded(noise(16, 16), file_format))
    assert error.code in (ErrorCode.UNSUPPORTED_FORMAT, ErrorCode.NOT_AN_IMAGE)


def test_too_many_pixels_are_refused_from_the_header_with_both_numbers() -> None:
    data = memoryview(encoded(noise(100, 100), "PNG"))
    with pytest.raises(ItemError) as caught:
        reader(max_pixels=9_999).size(data)
    error = caught.value
    assert (error.code, error.value, error.limit) == (ErrorCode.TOO_MANY_PIXELS, 10_000, 9_999)
    assert reader(max_pixels=10_000).size(data) == ImageSize(100, 100)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_size_from_the_header_is_that_of_the_upright_picture(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = memoryview(encoded(noise(20, 30), file_format, exif=exif))
    size = reader().size(data)
    assert (size.width, size.height) == ((20, 30) if orientation >= 5 else (30, 20))
    assert reader().rgb(data).shape == (size.height, size.width, 3)


def test_orientation_behind_the_pixels_of_a_png_counts_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(noise(20, 30), "PNG")
    end = plain.rindex(b"IEND") - 4
    data = memoryview(plain[:end] + png_chunk(b"eXIf", exif.tobytes()[6:]) + plain[end:])
    assert reader().size(data) == ImageSize(20, 30)
    assert np.array_equal(reader().rgb(data), np.rot90(noise(20, 30), -1))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
def test_a_picture_cut_anywhere_is_refused_or_whole(file_format: str) -> None:
    whole = encoded(noise(40, 40), file_format)
    expected = reader().rgb(memoryview(whole))
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        try:
            pixels = reader().rgb(memoryview(whole[:cut]))
        except ItemError:
            continue
        assert np.array_equal(pixels, expected)  # only what lies behind the pixels may be missing


def test_damaged_pictures_raise_nothing_but_item_errors() -> None:
    random = np.random.default_rng(3)
    for file_format in FORMATS:
        whole = encoded(noise(24, 24), file_format)
        for _ in range(60):
            damaged = bytearray(whole)
            for position in random.integers(0, len(whole), 4):
                damaged[position] ^= 1 << int(random.integers(0, 8))
            try:
                reader().size(memoryview(damaged))
                reader().rgb(memoryview(damaged))
            except ItemError as error:
                assert error.code in (  # noqa: PT017
                    ErrorCode.DECODE_FAILED,
                    ErrorCode.TRUNCATED,
                    ErrorCode.NOT_AN_IMAGE,
                    ErrorCode.UNSUPPORTED_FORMAT,
                    ErrorCode.TOO_MANY_PIXELS,
                )


@pytest.mark.parametrize(("background", "expected"), [("white", 255), ("black", 0), ("drop", 77)])
def test_transparency_shows_the_background(background: str, expected: int) -> None:
    pixels = np.full((4, 4, 4), 77, dtype=np.uint8)
    pixels[..., 3] = 0
    data = memoryview(encoded(pixels, "PNG"))
    rgb = ImageReader(100, parse_background(background)).rgb(data)
    assert (rgb == expected).all()


def test_an_unknown_background_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError):
        parse_background("green")
