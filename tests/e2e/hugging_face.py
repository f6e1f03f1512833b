"""What Hugging Face itself says about picture files: the reference of test_parity, in a process of its own.

    python -m tests.e2e.hugging_face OUT.npz CHECKPOINT... -- PICTURE...

For each checkpoint, named by its directory's name, and each dtype in float32, bfloat16, float64:
`name/dtype/alone/i` is picture i through get_image_features by itself, `name/dtype/together/i` picture i
of all pictures in one call. Rows are float32 arrays (float64 for float64); bfloat16 widens exactly.
DeepStack levels stand beside the main rows, as columns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

Rows = NDArray[np.floating]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def main(arguments: list[str]) -> None:
    """See the module's text."""
    split = arguments.index("--")
    torch.set_num_threads(1)  # as a CPU worker: the number of threads decides how sums are split
    images = [Image.open(path).convert("RGB") for path in arguments[split + 1 :]]
    results: dict[str, Rows] = {}
    for checkpoint in arguments[1:split]:
        for label, dtype in DTYPES.items():
            for name, rows in _features(checkpoint, dtype, images).items():
                results[f"{Path(checkpoint).name}/{label}/{name}"] = rows
    np.savez(arguments[0], allow_pickle=False, **results)


def _features(checkpoint: str, dtype: torch.dtype, images: list[Image.Image]) -> dict[str, Rows]:
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype).eval()
    results = {}
    for index, image in enumerate(images):
        results[f"alone/{index}"] = _encode(model, processor, [image])[0]
    for index, rows in enumerate(_encode(model, processor, images)):
        results[f"together/{index}"] = rows
    return results


def _encode(model: Any, processor: Any, images: list[Image.Image]) -> list[Rows]:
    inputs = processor(images=images, return_tensors="pt")
    with torch.inference_mode():
        output = model.get_image_features(
            pixel_values=inputs["pixel_values"].to(model.dtype),
            image_grid_thw=inputs["image_grid_thw"],
        )
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return [_widen(torch.cat(parts, dim=-1)) for parts in zip(*levels, strict=True)]


def _widen(rows: torch.Tensor) -> Rows:
    wide: Rows = (rows if rows.dtype is torch.float64 else rows.float()).numpy()
    return wide


if __name__ == "__main__":
    main(sys.argv[1:])
