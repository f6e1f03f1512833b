"""Regions: shared objects with a checked header. Creates, attaches, seals and prefaults them.

Called by whoever owns a region: control creates links, the arena, segments and session regions; workers and
clients attach what they were given by descriptor. A name exists only inside `create_region`.
"""

import errno
import fcntl
import mmap
import os
import secrets
from contextlib import ExitStack
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

import posix_ipc

from shm import _core
from shm.errors import RegionCorrupt, RegionUnavailable
from shm.layout import (
    LAYOUT_VERSION,
    PAGE_BYTES,
    REGION_HEADER_BYTES,
    VERSION_OFFSET,
    RegionHeader,
    RegionKind,
)
from shm.room import memory_room, posix_room

# From linux/mman.h and linux/fcntl.h; Python 3.11 has no names for them.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_F_SEAL_FUTURE_WRITE: Final = 0x10
_PREFAULT_STEP_BYTES: Final = 64 << 20
_MIB: Final = 1 << 20


class Backing(StrEnum):
    """What a region is made of."""

    POSIX = "posix"
    MEMFD = "memfd"


class Region:
    """A mapped region and its descriptor.

    `header` is a private copy, checked once: the words in shared memory are not read again. Closing gives the
    descriptor back at once; the mapping itself lives on until the last view taken from it is gone (numpy
    arrays, tensors, rings), because unmapping under a reader would be a crash.
    """

    def __init__(self, fd: int, memory: mmap.mmap, header: RegionHeader, *, writable: bool) -> None:
        self.fd = fd
        self.header = header
        self.writable = writable
        self._memory: mmap.mmap | None = memory
        self._view = memoryview(memory)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole region, header included."""
        return self.header.size_bytes

    @property
    def memory(self) -> mmap.mmap:
        """The mapping, for `_core`. ValueError once the region is closed."""
        if self._memory is None:
            raise ValueError("the region is closed")
        return self._memory

    @property
    def view(self) -> memoryview:
        """All bytes of the region; writable only where the region is. ValueError once it is closed."""
        if self._memory is None:
            raise ValueError("the region is closed")
        return self._view

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._memory is None

    def close(self) -> None:
        """Give the descriptor back and unmap, now or when the last view taken from here is gone."""
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        try:
            self._view.release()
            memory.close()
        except BufferError:
            pass  # Somebody still looks at it: the mapping ends with the last of them.
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def create_region(
    kind: RegionKind,
    size_bytes: int,
    *,
    boot_id: bytes,
    place: int = 0,
    epoch: int = 0,
    capacity: int = 0,
    payload_offset: int = 0,
    reserve_bytes: int | None = None,
    backing: Backing,
    label: str,
) -> Region:
    """A new, reserved, writable region that only its descriptor leads to.

    size_bytes: whole pages. boot_id: 16 bytes. label: for messages and /proc/PID/maps, no secret.
    reserve_bytes: how much of it has its pages from the start (default: all); no process of ours may touch
    the rest through a mapping.
    RegionUnavailable if that much cannot be had; nothing is left behind then.
    """
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise ValueError(f"a region is whole pages of {PAGE_BYTES} bytes, not {size_bytes} bytes")
    header = RegionHeader(kind, place, epoch, size_bytes, capacity, payload_offset, boot_id)
    with ExitStack() as undo:
        fd = _open_posix() if backing is Backing.POSIX else _open_memfd(label)
        undo.callback(os.close, fd)
        _reserve(fd, size_bytes, size_bytes if reserve_bytes is None else reserve_bytes, backing, label)
        if backing is Backing.MEMFD:
            _add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(fd, size_bytes)
        memory[:REGION_HEADER_BYTES] = header.pack()
        # Released last. PAIRS: the acquire of the version in attach_region.
        _core.word_store(memory, VERSION_OFFSET, LAYOUT_VERSION)
        undo.pop_all()
    return Region(fd, memory, header, writable=True)


def attach_region(fd: int, kind: RegionKind, *, writable: bool) -> Region:
    """Map the region behind a descriptor, which is taken over (closed if this fails).

    RegionCorrupt if it is not a finished region of this kind or is smaller than its header says.
    """
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        size_bytes = os.fstat(fd).st_size
        if size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
            raise RegionCorrupt(f"an object of {size_bytes} bytes is no region")
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
        undo.callback(memory.close)
        header = _checked_header(memory, size_bytes, kind)
        undo.pop_all()
    return Region(fd, memory, header, writable=writable)


def reopen_read_only(fd: int) -> int:
    """A second descriptor of the same object that can never be mapped writable. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def seal_against_writers(fd: int) -> None:
    """Refuse every writable mapping and write from now on; the mappings there are stay writable.

    For memfds only, once all writers have mapped. No hole can be punched afterwards.
    """
    _add_seals(fd, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def seal_size(fd: int) -> None:
    """Fix a client-writable memfd's size for good; let nobody add seals (one could stop the client)."""
    _add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def choose_backing(requested: str, need_bytes: int) -> Backing:
    """The backing for regions of need_bytes in all. requested: "auto", "posix" or "memfd".

    auto is POSIX where /dev/shm has the room, else memfd (a container's /dev/shm often has 64 MiB).
    """
    if requested != "auto":
        return Backing(requested)
    try:
        filesystem_bytes = posix_room().free_bytes
    except OSError:
        return Backing.MEMFD
    return Backing.POSIX if filesystem_bytes >= need_bytes else Backing.MEMFD


def prefault(region: Region, *, write: bool) -> None:
    """Fill the page tables now, so that no first touch costs anything later.

    write: also allocate and clear the pages (their owner, at start); else only map them (readers). A kernel
    before 5.14 cannot; then the pages come one by one as they are touched.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    # In steps, because madvise holds the interpreter lock.
    for start in range(0, region.size_bytes, _PREFAULT_STEP_BYTES):
        nbytes = min(_PREFAULT_STEP_BYTES, region.size_bytes - start)
        try:
            region.memory.madvise(advice, start, nbytes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return
            raise


def forget_pages(region: Region, offset: int, nbytes: int) -> None:
    """Drop whole pages from this process's page tables; what they hold stays, here and for everybody."""
    region.memory.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def punch_hole(region: Region, offset: int, nbytes: int) -> None:
    """Give whole pages of a POSIX region back to the kernel; they read as zeros from now on, for everybody.

    Needs a writable mapping. A memfd that is sealed against writers refuses (PermissionError).
    """
    region.memory.madvise(mmap.MADV_REMOVE, offset, nbytes)


def _open_posix() -> int:
    """A new descriptor of a nameless POSIX shared memory object."""
    name = f"/encoderd-{secrets.token_hex(16)}"
    shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    # At once and not after the reservation, which takes most of a second for each GiB: a process killed
    # between these two lines is the only way to leave a name in /dev/shm.
    shared.unlink()
    fd: int = shared.fd
    os.set_inheritable(fd, False)
    return fd


def _open_memfd(label: str) -> int:
    fd = os.memfd_create(f"encoderd-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)  # a memfd is born 0777: anybody who receives it could re-open it writable
    return fd


def _reserve(fd: int, size_bytes: int, reserve_bytes: int, backing: Backing, label: str) -> None:
    """Give the object its size and its pages: a full machine is an error here and no SIGBUS later."""
    room = posix_room() if backing is Backing.POSIX else memory_room()
    if reserve_bytes > room.free_bytes:
        raise _unavailable(reserve_bytes, backing, label)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, reserve_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _unavailable(reserve_bytes, backing, label) from None
        raise


def _unavailable(size_bytes: int, backing: Backing, label: str) -> RegionUnavailable:
    room = posix_room() if backing is Backing.POSIX else memory_room()
    fix = (
        "enlarge /dev/shm, or take the memfd backing, or make it smaller"
        if backing is Backing.POSIX
        else "free memory or raise the limit, or make it smaller"
    )
    return RegionUnavailable(
        f"{label}: wanted {-(-size_bytes // _MIB)} MiB of {backing} shared memory, "
        f"available {room.free_bytes // _MIB} MiB ({room.limit}); {fix}"
    )


def _add_seals(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _checked_header(memory: mmap.mmap, size_bytes: int, kind: RegionKind) -> RegionHeader:
    # Acquired first. PAIRS: the release of the version in create_region.
    version = _core.word_load(memory, VERSION_OFFSET)
    if version != LAYOUT_VERSION:
        raise RegionCorrupt(f"layout version {version}, this code speaks {LAYOUT_VERSION}")
    header = RegionHeader.unpack(memory[:REGION_HEADER_BYTES])
    if header.kind is not kind:
        raise RegionCorrupt(f"a region of kind {header.kind.name} where {kind.name} was expected")
    if header.size_bytes > size_bytes or header.payload_offset > header.size_bytes:
        raise RegionCorrupt("the region's header names more bytes than the object has")
    return header
