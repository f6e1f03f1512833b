"""The two scripts that tests.bench.encode races against, each a process of its own.

    python -m tests.bench.encode_scripts hand|plain CHECKPOINT PICTURES TORCH_THREADS PREPARE_THREADS

hand: what somebody writes who wants these pictures encoded as fast as possible in one process: threads decode
and preprocess (with encoderd's own modules) while the main thread forwards fixed batches. plain: Pillow,
AutoImageProcessor, forward, one picture after the other.

Loads, says "ready", then answers each line on standard input, a Command as JSON, with a line, a Result.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from gpu_workers.media.image import ImageReader, parse_background
from gpu_workers.media.pixels import open_pixels
from gpu_workers.towers import load_towers
from tests.bench.processes import peak_bytes

_MAX_PIXELS = 33_500_000
_AHEAD_BATCHES = 2  # being prepared or prepared, as the worker has it


class Command(msgspec.Struct):
    """Encode the first `count` pictures, `batch_items` to a forward; write their rows to rows_path if any."""

    count: int
    batch_items: int = 1
    rows_path: str = ""


class Result(msgspec.Struct):
    """What one command took, and the process's peak so far."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Patches(NamedTuple):
    """A picture ready for the tower."""

    pixel_values: torch.Tensor
    grid: list[int]


def main() -> None:
    """See the module's text."""
    kind, checkpoint, pictures, torch_threads, prepare_threads = sys.argv[1:]
    torch.set_num_threads(int(torch_threads))
    files = [path.read_bytes() for path in sorted(Path(pictures).iterdir())]
    encode: Callable[[list[bytes], int], list[torch.Tensor]]
    if kind == "hand":
        encode = HandWritten(checkpoint, int(prepare_threads)).encode
    else:
        encode = PlainLoop(checkpoint).encode
    print("ready", flush=True)
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        started, cpu_started = time.perf_counter(), time.process_time()
        rows = encode(files[: command.count], command.batch_items)
        result = Result(time.perf_counter() - started, time.process_time() - cpu_started, peak_bytes("self"))
        if command.rows_path:
            np.save(command.rows_path, torch.cat(rows).numpy())
        print(msgspec.json.encode(result).decode(), flush=True)


class HandWritten:
    """Decode and preprocess on threads, overlapping the forwards."""

    def __init__(self, checkpoint: str, prepare_threads: int) -> None:
        self._model = _tower(checkpoint)
        self._processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
        self._pixels = open_pixels(self._processor, dtype=torch.float32, device=torch.device("cpu"))
        self._reader = ImageReader(_MAX_PIXELS, parse_background("white"))
        self._threads = ThreadPoolExecutor(prepare_threads)

    def encode(self, files: list[bytes], batch_items: int) -> list[torch.Tensor]:
        """Rows of each picture."""
        prepared: list[Future[Patches]] = []
        rows: list[torch.Tensor] = []
        for first in range(0, len(files), batch_items):
            wanted = min(len(files), first + (1 + _AHEAD_BATCHES) * batch_items)
            prepared += [self._threads.submit(self._prepare, file) for file in files[len(prepared) : wanted]]
            last = min(len(files), first + batch_items)
            rows += self._forward([prepared[index].result() for index in range(first, last)])
            prepared[first:last] = [Future()] * (last - first)  # lets go of the patches
        return rows

    def _prepare(self, file: bytes) -> Patches:
        processor = self._processor
        rgb = self._reader.rgb(memoryview(file))
        height, width = smart_resize(
            rgb.shape[0],
            rgb.shape[1],
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        grid = [1, height // processor.patch_size, width // processor.patch_size]
        return Patches(self._pixels.pixel_values(rgb[None], height, width), grid)

    def _forward(self, batch: list[Patches]) -> list[torch.Tensor]:
        with torch.inference_mode():
            output = self._model.get_image_features(
                pixel_values=torch.cat([patches.pixel_values for patches in batch]),
                image_grid_thw=torch.tensor([patches.grid for patches in batch]),
            )
        return list(output.pooler_output)


class PlainLoop:
    """What the model's card says."""

    def __init__(self, checkpoint: str) -> None:
        self._model = _tower(checkpoint)
        self._processor = transformers.AutoImageProcessor.from_pretrained(checkpoint)

    def encode(self, files: list[bytes], _batch_items: int) -> list[torch.Tensor]:
        """Rows of each picture."""
        rows: list[torch.Tensor] = []
        for file in files:
            picture = Image.open(BytesIO(file)).convert("RGB")
            with torch.inference_mode():
                inputs = self._processor(images=[picture], return_tensors="pt")
                rows += self._model.get_image_features(**inputs).pooler_output
        return rows


def _tower(checkpoint: str) -> Any:
    transformers.logging.set_verbosity_error()
    return load_towers(
        transformers.Qwen2VLForConditionalGeneration,
        checkpoint,
        dtype="float32",
        device=torch.device("cpu"),
        trust_remote_code=False,
    )


if __name__ == "__main__":
    main()
