"""Pictures a second of a real worker, of the plain Hugging Face loop, and of the bare tower."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.bench.photographs import photograph
from tests.gpu.checkpoint import load_tower, rows_of
from tests.gpu.driver import Driver, Run
from tests.gpu.scale import Scale, TowerShape

_DISTINCT = 8
_SAMPLES_PER_SECOND = 50
_BATCHES = (1, 4, 16, 32)


class Throughput(NamedTuple):
    """One kind of picture."""

    picture: str
    run: Run
    busy_share: float | None  # of the device, as its driver says; None without CUDA
    plain_per_s: float
    bare_per_s: float
    bare_batch_items: int


def picture_sets(scale: Scale) -> dict[str, list[bytes]]:
    """Some different files of each size, and all of them together."""
    sets = {
        name: [photograph(width, height, seed) for seed in range(_DISTINCT)]
        for name, (width, height) in scale.pictures.items()
    }
    return {**sets, "mixed": [file for files in zip(*sets.values(), strict=True) for file in files]}


class Rivals:
    """The two single-process ways to the same rows, on the same device."""

    def __init__(self, shape: TowerShape, checkpoint: Path, scale: Scale) -> None:
        self._scale = scale
        self._model = load_tower(shape, checkpoint, scale.dtype, scale.torch_device)
        self._processor: Any = AutoImageProcessor.from_pretrained(checkpoint)

    def plain_per_s(self, files: list[bytes]) -> float:
        """Pillow, AutoImageProcessor, forward, rows to the CPU; one after the other."""
        return self._per_second(files, 1, lambda batch: self._forward(self._inputs(batch)).cpu())

    def bare_per_s(self, files: list[bytes]) -> tuple[float, int]:
        """The tower on patches that lie on the device: the best batch's pictures a second, and that batch."""
        rates: list[tuple[float, int]] = []
        for batch_items in _BATCHES:
            if batch_items <= self._scale.max_batch_items:
                chosen = [files[number % len(files)] for number in range(batch_items)]
                inputs = self._inputs(chosen)
                if len(inputs["pixel_values"]) <= self._scale.max_batch_patches:
                    rates.append((self._bare_rate(inputs, batch_items), batch_items))
        return max(rates)

    def _bare_rate(self, inputs: dict[str, torch.Tensor], batch_items: int) -> float:
        return self._per_second([b""] * batch_items, batch_items, lambda _: self._forward(inputs))

    def _inputs(self, files: list[bytes]) -> dict[str, torch.Tensor]:
        pictures = [Image.open(BytesIO(file)).convert("RGB") for file in files]
        inputs = self._processor(images=pictures, return_tensors="pt")
        device = self._scale.torch_device
        return {
            "pixel_values": inputs["pixel_values"].to(device, self._scale.dtype),
            "image_grid_thw": inputs["image_grid_thw"].to(device),
        }

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return rows_of(self._model.get_image_features(**inputs))

    def _per_second(
        self, files: list[bytes], batch_items: int, call: Callable[[list[bytes]], torch.Tensor]
    ) -> float:
        call(files[:batch_items])
        self._synchronize()
        count, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < self._scale.figure_seconds / 3:
            first = count % len(files)
            call(files[first : first + batch_items])
            self._synchronize()  # every rival hands over what it was asked for before it goes on
            count += batch_items
        return count / passed

    def _synchronize(self) -> None:
        if self._scale.device != "cpu":
            torch.cuda.synchronize()


def measure(driver: Driver, rivals: Rivals, name: str, files: list[bytes], scale: Scale) -> Throughput:
    """The worker, then its rivals, while the other side is idle."""
    first = driver.encode(files, min(len(files), scale.max_pictures))
    second = driver.encode(files, _count(first.images_per_s, scale, 0.25))
    with _device_use(scale) as use:
        run = driver.encode(files, _count(second.images_per_s, scale, 1.0))
    bare_per_s, bare_batch_items = rivals.bare_per_s(files)
    busy_share = sum(use) / len(use) / 100 if use else None
    return Throughput(name, run, busy_share, rivals.plain_per_s(files), bare_per_s, bare_batch_items)


def _count(per_s: float, scale: Scale, figures: float) -> int:
    return max(8, min(scale.max_pictures, round(per_s * scale.figure_seconds * figures)))


@contextmanager
def _device_use(scale: Scale) -> Iterator[list[int]]:
    """Per cent of the last moments in which a kernel ran, as the driver samples it, of all processes."""
    samples: list[int] = []
    if scale.device == "cpu":
        yield samples
        return
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(1 / _SAMPLES_PER_SECOND):
            samples.append(int(torch.cuda.utilization()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
