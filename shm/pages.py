"""First-fit allocation of contiguous page runs. Private memory of one process, never shared.

The arena (control) and the segment writer (worker) each own one. Positions are bytes from the region's
start; lengths are rounded up to whole pages.
"""

from bisect import bisect_left
from dataclasses import dataclass

from shm.layout import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PageStatistics:
    """What a PageRuns holds. All in bytes, except the two counts of runs."""

    total_bytes: int
    free_bytes: int
    largest_free_bytes: int
    free_runs: int
    used_runs: int


class PageRuns:
    """Free and used runs of pages between first_page and first_page + page_count."""

    def __init__(self, first_page: int, page_count: int) -> None:
        if first_page < 0 or page_count < 0:
            raise ValueError("page numbers and counts are not negative")
        self._total_pages = page_count
        self._free_pages = page_count
        # Two parallel lists, sorted by start; neighbours never touch (they are one run then).
        self._starts = [first_page] if page_count else []
        self._lengths = [page_count] if page_count else []
        self._used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Offset in bytes of a run of at least nbytes, the lowest that fits; None when none does."""
        if nbytes <= 0:
            raise ValueError("an allocation has at least one byte")
        pages = -(-nbytes // PAGE_BYTES)
        for index, length in enumerate(self._lengths):
            if length >= pages:
                return self._take(index, pages) * PAGE_BYTES
        return None

    def free(self, offset_bytes: int) -> None:
        """Give a run back. ValueError if no run that is in use begins there."""
        start, rest = divmod(offset_bytes, PAGE_BYTES)
        if rest or start not in self._used:
            raise ValueError(f"no run in use begins at {offset_bytes}")
        pages = self._used.pop(start)
        self._free_pages += pages
        self._insert(start, pages)

    @property
    def free_bytes(self) -> int:
        """Bytes in all free runs together."""
        return self._free_pages * PAGE_BYTES

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the longest free run: what one allocation could have now."""
        return max(self._lengths, default=0) * PAGE_BYTES

    def statistics(self) -> PageStatistics:
        """A look inside."""
        return PageStatistics(
            total_bytes=self._total_pages * PAGE_BYTES,
            free_bytes=self.free_bytes,
            largest_free_bytes=self.largest_free_bytes,
            free_runs=len(self._starts),
            used_runs=len(self._used),
        )

    def _take(self, index: int, pages: int) -> int:
        """Cut pages off the front of free run `index`; the page number where they begin."""
        start = self._starts[index]
        if self._lengths[index] == pages:
            del self._starts[index], self._lengths[index]
        else:
            self._starts[index] += pages
            self._lengths[index] -= pages
        self._used[start] = pages
        self._free_pages -= pages
        return start

    def _insert(self, start: int, pages: int) -> None:
        """Put a free run into its place and join it with the neighbours it touches."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and start + pages == self._starts[index]:
            pages += self._lengths[index]
            del self._starts[index], self._lengths[index]
        if index and self._starts[index - 1] + self._lengths[index - 1] == start:
            self._lengths[index - 1] += pages
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, pages)
