"""How much of the copy-out hides behind the next forward, with the worker's own device class and order."""

import os
import queue
import threading
import time
from typing import Final, NamedTuple

import torch

from gpu_workers.device import Mark
from gpu_workers.torch_device import CpuDevice, CudaDevice, open_device
from shm.region import Backing, Region
from shm.segment import create_segment, segment_layout
from tests.gpu.scale import Scale

_PRODUCTS: Final = 4  # matrix products of one pretended forward
_ROUNDS: Final = 3


class Hidden(NamedTuple):
    """Seconds of as many forwards: alone, with copies beside the next one, with copies in between."""

    alone_seconds: float
    beside_seconds: float
    between_seconds: float

    @property
    def hidden_share(self) -> float:
        """1: the copies cost nothing; 0: they cost what they cost in between."""
        cost = self.between_seconds - self.alone_seconds
        return 1.0 if cost <= 0 else 1 - (self.beside_seconds - self.alone_seconds) / cost


def measure(scale: Scale) -> Hidden:
    """Forwards of some milliseconds, rows of an eighth of copy_bytes each."""
    region = create_segment(
        2 * scale.copy_bytes, boot_id=os.urandom(16), place=0, epoch=1, backing=Backing.MEMFD
    )
    with region as segment:
        pipeline = _Pipeline(scale, segment)
        pipeline.beside()  # everything once
        runs = [(pipeline.alone(), pipeline.beside(), pipeline.between()) for _ in range(_ROUNDS)]
        return Hidden(*(min(times) for times in zip(*runs, strict=True)))


class _Pipeline:
    def __init__(self, scale: Scale, segment: Region) -> None:
        self._device: CpuDevice | CudaDevice = open_device(scale.device, 1, segment)
        self._forwards = scale.hidden_forwards
        side = scale.matrix_side
        self._matrix = torch.randn(side, side, device=scale.torch_device, dtype=scale.dtype)
        row_count = max(1, scale.copy_bytes // 8 // (side * scale.dtype.itemsize))
        self._picked = torch.arange(row_count, device=scale.torch_device) % side
        first = segment_layout(segment.size_bytes)[1]
        nbytes = row_count * side * scale.dtype.itemsize
        self._target = segment.view[first : first + nbytes]

    def alone(self) -> float:
        """No copies."""
        started = time.perf_counter()
        for _ in range(self._forwards):
            self._forward()
        self._device.mark().wait()
        return time.perf_counter() - started

    def between(self) -> float:
        """Every forward waits for the copy before it."""
        started = time.perf_counter()
        for _ in range(self._forwards):
            self._deliver(self._forward(), self._device.mark())
        return time.perf_counter() - started

    def beside(self) -> float:
        """A second thread delivers, one batch behind, as gpu_workers.deliver does."""
        batches: queue.Queue[tuple[torch.Tensor, Mark] | None] = queue.Queue(maxsize=1)

        def deliver() -> None:
            while (batch := batches.get()) is not None:
                self._deliver(*batch)

        started = time.perf_counter()
        thread = threading.Thread(target=deliver)
        thread.start()
        for _ in range(self._forwards):
            batches.put((self._forward(), self._device.mark()))
        batches.put(None)
        thread.join()
        return time.perf_counter() - started

    def _forward(self) -> torch.Tensor:
        product = self._matrix
        for _ in range(_PRODUCTS):
            product = product @ self._matrix
        return product[self._picked]

    def _deliver(self, rows: torch.Tensor, finished: Mark) -> None:
        self._device.copy_rows(rows, self._target, finished)
        finished.wait()
        self._device.finish_copies()
