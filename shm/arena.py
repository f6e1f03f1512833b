"""The input arena: request bytes on their way to the workers. Control writes, workers read.

InputArena is control's side (its one thread allocates and frees); ArenaReader is a worker's. A block lives
until its request has ended, because a retry on another worker needs the same bytes.
"""

from types import TracebackType
from typing import Final, Self

from shm.errors import RegionCorrupt
from shm.layout import PAGE_BYTES, RegionKind, page_align
from shm.pages import PageRuns, PageStatistics
from shm.region import Backing, Region, create_region, forget_pages

# The allocator is first-fit, so ordinary load stays below this and keeps its page tables warm; what a burst
# touched beyond it leaves the process's resident size again.
KEPT_BYTES: Final = 16 << 20


def create_arena(payload_bytes: int, *, boot_id: bytes, backing: Backing) -> Region:
    """The region of an arena with room for payload_bytes (rounded up to pages). RegionUnavailable."""
    return create_region(
        RegionKind.ARENA,
        PAGE_BYTES + page_align(payload_bytes),
        boot_id=boot_id,
        payload_offset=PAGE_BYTES,
        backing=backing,
        label="arena",
    )


class InputBlock:
    """One request's bytes in the arena; `with` frees it unless it was handed over.

    view: writable, exactly nbytes long. It holds whatever the last user left until it is overwritten.
    """

    def __init__(self, arena: "InputArena", offset: int, nbytes: int, view: memoryview) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.view = view
        self._arena = arena
        self._freed = False
        self._handed_over = False

    def hand_over(self) -> Self:
        """Leave `with` without freeing: from here on the block's new owner calls free()."""
        self._handed_over = True
        return self

    def free(self) -> None:
        """Give the pages back, once: ValueError the second time. The view cannot be used afterwards."""
        if self._freed:
            raise ValueError("this input block is already free")
        self.view.release()
        self._freed = True
        self._arena.take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._freed and not self._handed_over:
            self.free()


class InputArena:
    """Control's side: who owns which bytes of the arena is private to this object."""

    def __init__(self, region: Region) -> None:
        first = region.header.payload_offset
        self._region = region
        self._pages = PageRuns(first // PAGE_BYTES, (region.size_bytes - first) // PAGE_BYTES)

    def allocate(self, nbytes: int) -> InputBlock | None:
        """A block of nbytes (at least 1), or None when there is no contiguous room for it now."""
        offset = self._pages.allocate(nbytes)
        if offset is None:
            return None
        return InputBlock(self, offset, nbytes, self._region.view[offset : offset + nbytes])

    def take_back(self, block: InputBlock) -> None:
        """Called by block.free() only."""
        self._pages.free(block.offset)
        end = block.offset + page_align(block.nbytes)
        if end > KEPT_BYTES:
            start = max(block.offset, KEPT_BYTES)
            forget_pages(self._region, start, end - start)

    @property
    def total_bytes(self) -> int:
        """What the empty arena could hold: a larger request never fits."""
        return self._pages.statistics().total_bytes

    @property
    def largest_free_bytes(self) -> int:
        """What one block could have now."""
        return self._pages.largest_free_bytes

    def statistics(self) -> PageStatistics:
        """Free and used bytes and runs."""
        return self._pages.statistics()


class ArenaReader:
    """A worker's side: read-only views, range-checked, of the blocks that control names."""

    def __init__(self, region: Region) -> None:
        self._view = region.view.toreadonly()
        self._payload_offset = region.header.payload_offset
        self._size_bytes = region.size_bytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """nbytes at offset (from the region's start), read-only. RegionCorrupt if outside the payload."""
        if offset < self._payload_offset or offset > self._size_bytes:
            raise RegionCorrupt(f"an input block at {offset} is outside the arena")
        if nbytes < 0 or nbytes > self._size_bytes - offset:
            raise RegionCorrupt(f"an input block of {nbytes} bytes at {offset} leaves the arena")
        return self._view[offset : offset + nbytes]
