"""The devices of real towers: the CPU, and a CUDA device with a pinned segment and its own copy stream."""

import logging
from typing import Final

import torch

from gpu_workers.device import Failure, Mark, Reached
from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import Rows
from shm.region import Region

logger = logging.getLogger(__name__)

# What torch before AcceleratorError, and libraries below it, say when the context is broken for good.
_STICKY_TEXT: Final = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


def open_device(name: str, torch_threads: int, segment: Region) -> "CpuDevice | CudaDevice":
    """The device "cpu", "cuda" or "cuda:N". ConfigurationError if it is not there: never another one."""
    torch.set_num_threads(torch_threads)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"unknown device {name!r}") from None
    if device.type == "cpu":
        return CpuDevice()
    if device.type != "cuda":
        raise ConfigurationError(f"device {name!r} is not supported, known: cpu, cuda:N")
    if not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r} asked for, but torch finds no CUDA device")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigurationError(f"device {name!r} asked for, there are {torch.cuda.device_count()}")
    return CudaDevice(index, segment)


def _as_rows(target: memoryview, like: torch.Tensor) -> torch.Tensor:
    """A tensor over target's bytes, of the shape and type of `like`."""
    return torch.frombuffer(target, dtype=like.dtype).view(like.shape)


class CpuDevice:
    """Works while it is asked; nothing is ever under way."""

    name = "cpu"
    is_asynchronous = False
    torch_device = torch.device("cpu")

    def mark(self) -> Mark:
        """Already reached."""
        return Reached()

    def copy_rows(self, rows: Rows, target: memoryview, after: Mark) -> None:
        """Copies at once."""
        assert isinstance(rows, torch.Tensor), "towers give tensors"
        _as_rows(target, rows).copy_(rows)

    def finish_copies(self) -> None:
        """Every copy is finished when copy_rows returns."""

    def failure(self, error: Exception) -> Failure:
        """torch's allocator on the CPU raises RuntimeError with this text when the system has no memory."""
        if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            return Failure.OUT_OF_MEMORY
        return Failure.ORDINARY

    def free_cached_memory(self) -> None:
        """There is no cache."""


class CudaMark:
    """An event on the compute stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> int:
        """Sleeps in the driver, without the interpreter lock."""
        self.event.synchronize()
        return Reached().wait()


class CudaDevice:
    """Forwards run on the device thread's stream; rows leave by their own stream, straight into the segment.

    The segment is pinned (cudaHostRegister on the mapping), so the copies are asynchronous and at full speed.
    Where pinning is refused they are slower and still right.
    """

    is_asynchronous = True

    def __init__(self, index: int, segment: Region) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        logger.info("device %s is a %s", self.name, torch.cuda.get_device_name(index))
        self._copy_stream = torch.cuda.Stream(self.torch_device)
        self._pin(segment)

    def mark(self) -> Mark:
        """An event behind all kernels launched so far."""
        return CudaMark()

    def copy_rows(self, rows: Rows, target: memoryview, after: Mark) -> None:
        """Enqueues the copy behind the forward; the rows' memory is not reused before it is through."""
        assert isinstance(rows, torch.Tensor), "towers give tensors"
        assert isinstance(after, CudaMark), "marks are those of this device"
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(after.event)
            _as_rows(target, rows).copy_(rows, non_blocking=True)
            rows.record_stream(self._copy_stream)

    def finish_copies(self) -> None:
        """Waits for an event behind all copies: only then may anybody be told that the rows are there."""
        event = torch.cuda.Event()
        event.record(self._copy_stream)
        event.synchronize()

    def failure(self, error: Exception) -> Failure:
        """Anything from the CUDA runtime but running out of memory has broken the context."""
        if isinstance(error, torch.OutOfMemoryError):
            return Failure.OUT_OF_MEMORY
        accelerator_error: type[Exception] | None = getattr(torch, "AcceleratorError", None)  # torch >= 2.8
        if accelerator_error is not None and isinstance(error, accelerator_error):
            return Failure.STICKY
        if any(text in str(error) for text in _STICKY_TEXT):
            return Failure.STICKY
        return Failure.ORDINARY

    def free_cached_memory(self) -> None:
        """Gives the caching allocator's free blocks back to the driver."""
        torch.cuda.empty_cache()

    def _pin(self, segment: Region) -> None:
        # No flags: this mapping is writable (cudaHostRegisterReadOnly would forbid the copies), and a worker
        # has one device and so one context (cudaHostRegisterPortable is for more).
        address = torch.frombuffer(segment.view, dtype=torch.uint8).data_ptr()
        status = int(torch.cuda.cudart().cudaHostRegister(address, segment.size_bytes, 0))
        if status != 0:
            logger.warning("segment not pinned (cudaHostRegister status %d): copies will be slower", status)
