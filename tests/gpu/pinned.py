"""Copies between the device and a segment, pinned (cudaHostRegister) and not, on both kinds of mapping."""

import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from shm.layout import Dtype, RegionKind
from shm.region import Backing, Region, attach_region, prefault, reopen_read_only
from shm.segment import create_segment, segment_layout
from shm.torch_view import as_tensor
from tests.gpu.scale import Scale

_READ_ONLY: Final = 0x08  # cudaHostRegisterReadOnly
_ROW: Final = 4096
_REPEATS: Final = 5


class Copies(NamedTuple):
    """Gigabytes a second of one mapping. status: cudaHostRegister's, 0 for done, None on the CPU."""

    mapping: str
    direction: str
    pageable_gb_per_s: float
    pinned_gb_per_s: float
    status: int | None


def measure(scale: Scale) -> list[Copies]:
    """The worker's side (device to segment) and a reader's (segment, mapped read-only, to device)."""
    found: list[Copies] = []
    for backing in (Backing.POSIX, Backing.MEMFD):
        size_bytes = 2 * scale.copy_bytes
        with create_segment(size_bytes, boot_id=os.urandom(16), place=0, epoch=1, backing=backing) as segment:
            prefault(segment, write=True)
            found.append(_worker_side(segment, backing, scale))
            descriptor = reopen_read_only(segment.fd)
            with attach_region(descriptor, RegionKind.SEGMENT, writable=False) as reader:
                prefault(reader, write=False)
                found.append(_reader_side(reader, segment, backing, scale))
    return found


def _worker_side(segment: Region, backing: Backing, scale: Scale) -> Copies:
    source = torch.arange(scale.copy_bytes // 4, dtype=torch.float32, device=scale.torch_device)
    target = _payload(segment, scale).view(-1)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        _finish(scale)

    copies = _both(copy, segment, target, 0, f"{backing}, worker", "device to segment", scale)
    assert torch.equal(target, source.cpu()), f"{backing}: the segment does not hold what was copied"
    return copies


def _reader_side(reader: Region, segment: Region, backing: Backing, scale: Scale) -> Copies:
    _payload(segment, scale).fill_(1.5)
    source = _payload(reader, scale).view(-1)
    target = torch.zeros(source.shape, dtype=source.dtype, device=scale.torch_device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        _finish(scale)

    copies = _both(copy, reader, source, _READ_ONLY, f"{backing}, reader", "segment to device", scale)
    assert bool((target == 1.5).all()), f"{backing}: the device does not hold what the segment does"
    return copies


def _both(
    copy: Callable[[], None],
    region: Region,
    mapped: torch.Tensor,
    flags: int,
    mapping: str,
    direction: str,
    scale: Scale,
) -> Copies:
    """Before and after the region is registered; it is not afterwards."""
    nbytes = mapped.numel() * mapped.element_size()
    pageable = _gb_per_s(copy, nbytes)
    if scale.device == "cpu":
        return Copies(mapping, direction, pageable, _gb_per_s(copy, nbytes), None)
    start = mapped.data_ptr() - segment_layout(region.size_bytes)[1]
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(start, region.size_bytes, flags))
    if status != 0:
        return Copies(mapping, direction, pageable, float("nan"), status)
    try:
        return Copies(mapping, direction, pageable, _gb_per_s(copy, nbytes), status)
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(start)


def _payload(region: Region, scale: Scale) -> torch.Tensor:
    """(rows, 4096) float32 over the segment's payload; not to be written where the region is read-only."""
    first = segment_layout(region.size_bytes)[1]
    view = region.view[first : first + scale.copy_bytes]
    return as_tensor(view, scale.copy_bytes // 4 // _ROW, _ROW, Dtype.FLOAT32)


def _gb_per_s(copy: Callable[[], None], nbytes: int) -> float:
    """The best of a few: a copy can only be disturbed."""
    copy()
    times: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        copy()
        times.append(time.perf_counter() - started)
    return nbytes / min(times) / 1e9


def _finish(scale: Scale) -> None:
    if scale.device != "cpu":
        torch.cuda.synchronize()
