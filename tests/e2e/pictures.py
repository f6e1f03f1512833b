"""Pictures that tests post: made from a seed, so every run sees the same bytes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

# (file name, width, height): small, wide, tall, off the patch grid, one JPEG as a camera makes it
FILES = (
    ("square.png", 112, 112),
    ("wide.png", 252, 60),
    ("tall.webp", 45, 190),
    ("odd.bmp", 131, 97),
    ("photo.jpg", 320, 213),
)


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Soft gradients with noise on top: no row and no patch is like another."""
    generator = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    planes = np.stack([across, down, (across + down) / 2], axis=-1)
    noisy = planes + generator.uniform(0, 55, planes.shape)
    return Image.fromarray(noisy.astype(np.uint8), "RGB")


def picture_bytes(width: int, height: int, seed: int, file_format: str = "PNG") -> bytes:
    """The same as a file's bytes."""
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, file_format)
    return buffer.getvalue()


def write_pictures(directory: Path) -> list[Path]:
    """Write FILES below directory."""
    paths = []
    for seed, (name, width, height) in enumerate(FILES):
        paths.append(directory / name)
        picture(width, height, seed).save(paths[-1])
    return paths
