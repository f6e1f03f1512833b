"""shm.region: creation, attachment, seals, and what happens where there is no room."""

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shm.errors import RegionCorrupt, RegionUnavailable
from shm.layout import PAGE_BYTES, REGION_HEADER_BYTES, RegionKind
from shm.region import (
    Backing,
    Region,
    attach_region,
    choose_backing,
    create_region,
    prefault,
    punch_hole,
    reopen_read_only,
    seal_against_writers,
    seal_size,
)
from tests.shared_memory import names_that_stay, shared_memory_names

BOOT = bytes(range(16))
BOTH = pytest.mark.parametrize("backing", list(Backing))
SMALL_SHM = """
from shm.errors import RegionUnavailable
from shm.layout import RegionKind
from shm.region import Backing, choose_backing, create_region
assert choose_backing("auto", 4 << 20) is Backing.MEMFD
assert choose_backing("auto", 1 << 20) is Backing.POSIX
create_region(RegionKind.ARENA, 1 << 20, boot_id=bytes(16), backing=Backing.POSIX, label="small").close()
try:
    create_region(RegionKind.ARENA, 4 << 20, boot_id=bytes(16), backing=Backing.POSIX, label="big")
except RegionUnavailable as error:
    print(error)
"""


def small(backing: Backing, kind: RegionKind = RegionKind.ARENA) -> Region:
    return create_region(
        kind, 4 * PAGE_BYTES, boot_id=BOOT, place=3, epoch=7, capacity=5, payload_offset=PAGE_BYTES,
        backing=backing, label="test",
    )  # fmt: skip


@BOTH
def test_a_region_is_read_by_whoever_has_its_descriptor(backing: Backing) -> None:
    with small(backing) as region:
        region.view[PAGE_BYTES : PAGE_BYTES + 5] = b"hello"
        with attach_region(reopen_read_only(region.fd), RegionKind.ARENA, writable=False) as reader:
            assert reader.header == region.header
            assert reader.header.boot_id == BOOT
            assert (reader.header.place, reader.header.epoch, reader.header.capacity) == (3, 7, 5)
            assert reader.view.readonly
            assert bytes(reader.view[PAGE_BYTES : PAGE_BYTES + 5]) == b"hello"


@BOTH
def test_a_region_has_no_name_and_is_fully_allocated(backing: Backing) -> None:
    before = shared_memory_names()
    with small(backing) as region:
        assert names_that_stay(before) == set()
        status = os.fstat(region.fd)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 == region.size_bytes
        assert not os.get_inheritable(region.fd)


@BOTH
def test_a_read_only_descriptor_cannot_become_writable(backing: Backing) -> None:
    with small(backing) as region:
        fd = reopen_read_only(region.fd)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, region.size_bytes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)
        os.close(fd)


def test_a_memfd_can_neither_shrink_nor_grow() -> None:
    with small(Backing.MEMFD) as region:
        for nbytes in (0, region.size_bytes * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, nbytes)


def test_a_memfd_sealed_against_writers_refuses_new_ones_and_keeps_the_old() -> None:
    with small(Backing.MEMFD) as region:
        seal_against_writers(region.fd)
        with pytest.raises(PermissionError):
            mmap.mmap(region.fd, region.size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(region.fd, b"x", 0)
        with pytest.raises(PermissionError):
            punch_hole(region, PAGE_BYTES, PAGE_BYTES)
        reopened = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, region.size_bytes)
        os.close(reopened)
        region.view[PAGE_BYTES] = 1
        with attach_region(reopen_read_only(region.fd), RegionKind.ARENA, writable=False) as reader:
            assert reader.view[PAGE_BYTES] == 1


def test_a_memfd_of_fixed_size_takes_no_further_seal() -> None:
    with small(Backing.MEMFD) as region:
        seal_size(region.fd)
        with pytest.raises(PermissionError):
            seal_against_writers(region.fd)


@BOTH
def test_another_kind_is_corrupt(backing: Backing) -> None:
    with small(backing) as region, pytest.raises(RegionCorrupt, match="ARENA"):
        attach_region(os.dup(region.fd), RegionKind.SEGMENT, writable=True)


@pytest.mark.parametrize("content", [b"", b"\0" * PAGE_BYTES, b"\xff" * PAGE_BYTES, b"x" * 5000])
def test_a_file_that_is_no_region_is_corrupt(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(RegionCorrupt):
        attach_region(fd, RegionKind.ARENA, writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_object_smaller_than_its_header_says_is_corrupt(tmp_path: Path) -> None:
    with small(Backing.POSIX) as region:
        (tmp_path / "cut").write_bytes(bytes(region.view[:PAGE_BYTES]))
    with pytest.raises(RegionCorrupt, match="more bytes"):
        attach_region(os.open(tmp_path / "cut", os.O_RDWR), RegionKind.ARENA, writable=True)


def test_an_unfinished_region_is_corrupt() -> None:
    with small(Backing.POSIX) as region:
        region.view[8:16] = bytes(8)
        with pytest.raises(RegionCorrupt, match="version 0"):
            attach_region(os.dup(region.fd), RegionKind.ARENA, writable=False)


@BOTH
def test_more_than_there_is_is_refused_with_numbers_and_leaves_nothing(backing: Backing) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionUnavailable, match=r"segment-0: wanted \d+ MiB .* available \d+ MiB \(.*\); "):
        create_region(RegionKind.SEGMENT, 1 << 50, boot_id=BOOT, backing=backing, label="segment-0")
    assert set(os.listdir("/proc/self/fd")) == before


def test_where_shared_memory_is_small_auto_takes_memfds_and_posix_says_why() -> None:
    mount = "mount -t tmpfs -o size=1m none /dev/shm && exec "
    command = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        mount + '"$0" -c "$1"',
        sys.executable,
        SMALL_SHM,
    ]
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True).returncode:
        pytest.skip("needs mount namespaces")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "wanted 4 MiB of posix shared memory, available 1 MiB (free space in /dev/shm)" in result.stdout


def test_a_requested_backing_is_taken_as_it_is() -> None:
    assert choose_backing("posix", 1 << 60) is Backing.POSIX
    assert choose_backing("memfd", 1) is Backing.MEMFD
    with pytest.raises(ValueError, match="hugetlb"):
        choose_backing("hugetlb", 1)


@pytest.mark.parametrize("size_bytes", [0, -PAGE_BYTES, 100, PAGE_BYTES + 1])
def test_a_region_is_whole_pages(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        create_region(RegionKind.ARENA, size_bytes, boot_id=BOOT, backing=Backing.POSIX, label="odd")


def test_closing_with_views_alive_unmaps_with_the_last_of_them() -> None:
    region = small(Backing.POSIX)
    region.view[PAGE_BYTES : PAGE_BYTES + 4] = b"kept"
    kept = region.view[PAGE_BYTES : PAGE_BYTES + 4]
    address = _mapped("dev/shm")
    region.close()
    region.close()
    assert bytes(kept) == b"kept"
    assert _mapped("dev/shm") == address
    for access in ("view", "memory"):
        with pytest.raises(ValueError, match="closed"):
            getattr(region, access)
    del kept
    gc.collect()
    assert _mapped("dev/shm") < address


def test_closing_gives_both_descriptors_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    small(Backing.MEMFD).close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_prefaulting_maps_every_page() -> None:
    with small(Backing.POSIX) as region:
        prefault(region, write=True)
        with attach_region(reopen_read_only(region.fd), RegionKind.ARENA, writable=False) as reader:
            prefault(reader, write=False)
            assert bytes(reader.view[REGION_HEADER_BYTES:]) == bytes(region.size_bytes - REGION_HEADER_BYTES)


def test_a_punched_hole_gives_the_memory_back_and_reads_as_zeros() -> None:
    with small(Backing.POSIX) as region:
        region.view[PAGE_BYTES : 3 * PAGE_BYTES] = b"\xa5" * (2 * PAGE_BYTES)
        punch_hole(region, PAGE_BYTES, PAGE_BYTES)
        assert os.fstat(region.fd).st_blocks * 512 == region.size_bytes - PAGE_BYTES
        assert region.view[PAGE_BYTES] == 0
        assert region.view[2 * PAGE_BYTES] == 0xA5


def _mapped(what: str) -> int:
    """How many mappings of this process come from there."""
    with open("/proc/self/maps") as maps:
        return sum(what in line for line in maps)
