"""What the pipeline needs of a device, and the one that needs no torch. torch_device.py has the real ones."""

import time
from enum import Enum, auto
from typing import Protocol

import numpy as np

from gpu_workers.families.base import Rows


class Failure(Enum):
    """What an exception out of a forward says about the device."""

    ORDINARY = auto()
    OUT_OF_MEMORY = auto()  # a smaller batch may do
    STICKY = auto()  # the device's context is broken: this process cannot use it any more


class Mark(Protocol):
    """A point in the device's work."""

    def wait(self) -> int:
        """Sleep until the device is there; CLOCK_MONOTONIC ns, as close to that moment as is known."""


class Device(Protocol):
    """Where forwards run. `mark` is for the device thread, the two copy methods are for deliver.py's."""

    name: str
    is_asynchronous: bool  # forwards and copies go on by themselves, and leave the processor to others

    def mark(self) -> Mark:
        """The end of everything the device thread has asked for so far."""

    def copy_rows(self, rows: Rows, target: memoryview, after: Mark) -> None:
        """Begin to copy rows (n, dim), finished at `after`, into target (n * dim elements, writable)."""

    def finish_copies(self) -> None:
        """Return when every copy begun is in its target."""

    def failure(self, error: Exception) -> Failure:
        """What kind of error a forward or a copy raised."""

    def free_cached_memory(self) -> None:
        """After OUT_OF_MEMORY: give back what only a cache holds."""


class Reached:
    """A Mark of a device that works while it is asked: reached when it is made."""

    def __init__(self) -> None:
        self._now_ns = time.monotonic_ns()

    def wait(self) -> int:
        """The time of its making."""
        return self._now_ns


class PlainDevice:
    """The processor, with numpy rows: for towers without torch."""

    name = "cpu"
    is_asynchronous = False

    def mark(self) -> Mark:
        """Already reached."""
        return Reached()

    def copy_rows(self, rows: Rows, target: memoryview, after: Mark) -> None:
        """Copies at once."""
        assert isinstance(rows, np.ndarray), "towers without torch give arrays"
        target[:] = rows.data.cast("B")

    def finish_copies(self) -> None:
        """Nothing is ever under way."""

    def failure(self, error: Exception) -> Failure:
        """MemoryError or ordinary."""
        return Failure.OUT_OF_MEMORY if isinstance(error, MemoryError) else Failure.ORDINARY

    def free_cached_memory(self) -> None:
        """There is no cache."""
