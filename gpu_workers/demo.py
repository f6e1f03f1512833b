"""The demo's two helpers that need model libraries, each run by `app.demo` as a process of its own.

python -m gpu_workers.demo draw PICTURE               writes a JPEG, always the same one
python -m gpu_workers.demo check CHECKPOINT PICTURE   handle on stdin; exit status 0 if the mapped rows
                                                      equal what the whole model says of the same file
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shm.client import connect
from shm.messages import Handle

if TYPE_CHECKING:
    import torch

PICTURE_WIDTH = 640
PICTURE_HEIGHT = 480


def main() -> int:
    """Run the named helper."""
    parser = argparse.ArgumentParser(prog="python -m gpu_workers.demo")
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("picture", type=Path)
    check = commands.add_parser("check")
    check.add_argument("checkpoint", type=Path)
    check.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        return draw_picture(options.picture)
    return check_handle(options.checkpoint, options.picture)


def draw_picture(path: Path) -> int:
    """A landscape with a low sun, four ridges and film grain: what a photograph asks of a decoder."""
    from PIL import Image

    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:PICTURE_HEIGHT, 0:PICTURE_WIDTH] / PICTURE_HEIGHT
    dusk, zenith = np.array([245.0, 170.0, 95.0]), np.array([40.0, 75.0, 140.0])
    pixels = zenith + (dusk - zenith) * np.clip(y * 1.6, 0, 1)[..., None]
    pixels += 255 * np.exp(-((x - 0.9) ** 2 + (y - 0.45) ** 2) * 60)[..., None]
    for depth, base in enumerate((0.5, 0.6, 0.7, 0.82)):
        waves = rng.uniform(2, 18, size=6)
        ridge = base + sum(np.sin(x * wave + rng.uniform(0, 6)) * 0.09 / wave for wave in waves)
        shade = np.array([70.0, 85.0, 90.0]) * (1 - depth * 0.22)
        pixels = np.where((y > ridge)[..., None], shade * (1.2 - 0.4 * y[..., None]), pixels)
    pixels += rng.normal(0, 4, size=(PICTURE_HEIGHT, PICTURE_WIDTH, 1))
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=92)
    return 0


def check_handle(checkpoint: Path, picture: Path) -> int:
    """Map the handle's rows, compute the reference, compare bit for bit, say what was seen."""
    handle = msgspec.json.decode(sys.stdin.buffer.read(), type=Handle)
    start = time.perf_counter()
    with connect(handle.attach) as session:
        connected = time.perf_counter()
        with session.attach(handle) as view:
            rows = view.numpy()
            mapped = time.perf_counter()
            _say(f"process {os.getpid()}: connect {(connected - start) * 1e3:.1f} ms")
            _say(f"handle to usable array {(mapped - connected) * 1e6:.0f} us: {rows.shape} {rows.dtype}")
            reference = hugging_face_rows(checkpoint, picture).numpy()
            _say(f"Hugging Face, whole model, same file: {time.perf_counter() - mapped:.1f} s")
            equal = rows.shape == reference.shape and bool(np.array_equal(rows, reference))
            view.check()  # the rows were this request's until here
    _say(f"{rows.size:,} values, {'all equal' if equal else _difference(rows, reference)}")
    return 0 if equal else 1


def hugging_face_rows(checkpoint: Path, picture: Path) -> "torch.Tensor":
    """(rows, dim): get_image_features of the whole model, loaded as anyone would, on one thread."""
    import torch
    import transformers
    from PIL import Image

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint)
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="auto").eval()
    inputs = processor(images=[Image.open(picture).convert("RGB")], return_tensors="pt")
    with torch.inference_mode():
        features = model.get_image_features(**inputs)
    return torch.cat(list(features.pooler_output))


def _difference(rows: np.ndarray, reference: np.ndarray) -> str:
    if rows.shape != reference.shape:
        return f"shapes differ: {rows.shape} mapped, {reference.shape} expected"
    return f"NOT equal: they differ by up to {np.abs(rows - reference).max():.3g}"


def _say(text: str) -> None:
    print(f"   {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
