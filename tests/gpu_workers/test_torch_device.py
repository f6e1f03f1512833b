"""The CPU device of real towers, and how a missing CUDA device is refused."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_workers.device import Failure
from gpu_workers.errors import ConfigurationError
from gpu_workers.torch_device import CpuDevice, open_device
from shm.layout import WorkerState
from shm.region import Backing, Region
from shm.segment import create_segment
from tests.gpu_workers.harness import Harness

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture
def segment() -> Iterator[Region]:
    with create_segment(1 << 20, boot_id=os.urandom(16), place=0, epoch=1, backing=Backing.MEMFD) as region:
        yield region


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_every_payload_type_are_copied(dtype: torch.dtype) -> None:
    rows = torch.arange(12, dtype=dtype).reshape(3, 4)
    target = bytearray(rows.nbytes)
    device = CpuDevice()
    device.copy_rows(rows, memoryview(target), device.mark())
    device.finish_copies()
    assert torch.equal(torch.frombuffer(target, dtype=dtype).view(3, 4), rows)


def test_rows_of_an_inference_forward_are_copied() -> None:
    with torch.inference_mode():
        rows = torch.ones(2, 2)
    target = bytearray(16)
    device = CpuDevice()
    device.copy_rows(rows, memoryview(target), device.mark())
    assert torch.frombuffer(target, dtype=torch.float32).tolist() == [1.0] * 4


def test_running_out_of_memory_is_told_from_other_failures() -> None:
    device = CpuDevice()
    with pytest.raises(RuntimeError) as allocation:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert device.failure(allocation.value) is Failure.OUT_OF_MEMORY
    assert device.failure(MemoryError()) is Failure.OUT_OF_MEMORY
    assert device.failure(ValueError("shapes")) is Failure.ORDINARY


@pytest.mark.parametrize("name", ["mps", "tpu:0", ""])
def test_a_device_that_is_none_of_ours_is_refused(name: str, segment: Region) -> None:
    with pytest.raises(ConfigurationError):
        open_device(name, 1, segment)


def test_the_number_of_torch_threads_is_the_configured_one(segment: Region) -> None:
    before = torch.get_num_threads()
    open_device("cpu", 1, segment)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@without_cuda
def test_a_worker_without_its_cuda_device_never_falls_back_to_the_cpu(
    start_worker: Callable[..., Harness], tiny_checkpoints: dict[str, Path]
) -> None:
    worker = start_worker(tower="auto", checkpoint=str(tiny_checkpoints["qwen2_vl"]), device="cuda:0")
    assert worker.wait_exit() == 78
    assert worker.control.state() is WorkerState.FAILED
    assert "torch finds no CUDA device" in worker.log[-1]
