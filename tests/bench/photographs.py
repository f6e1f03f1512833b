"""JPEGs that ask of a decoder what photographs ask: soft shapes, some grain, files of a photograph's size.

Used by tests.bench.encode and tests.gpu.
"""

import io
import math

import numpy as np
from PIL import Image

_SHAPE_PIXELS = 24
_GRAIN = 4.0


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG of quality 85: 1080p is about half a megabyte. The same arguments give the same bytes."""
    random = np.random.default_rng((seed, width, height))
    shapes = (math.ceil(height / _SHAPE_PIXELS), math.ceil(width / _SHAPE_PIXELS), 3)
    coarse = Image.fromarray(random.integers(0, 256, shapes, dtype=np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = random.standard_normal((height, width, 1), dtype=np.float32) * _GRAIN
    file = io.BytesIO()
    Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()
