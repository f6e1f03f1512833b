"""The client's side of its session's input region: which pages are free, and the bytes of a request.

`shm.encode_ring` owns one for each session. Only the client writes there; the daemon copies before it looks.
"""

from typing import Final

from shm.layout import PAGE_BYTES, SESSION_INPUT_OFFSET, page_align
from shm.pages import PageRuns
from shm.region import Region, punch_hole
from shm.session import write_run

# First-fit keeps ordinary load below this and warm; what a large request used beyond it goes back at once.
KEPT_BYTES: Final = 16 << 20


class InputPages:
    """Page runs of the input region. The caller's lock is around everything but write."""

    def __init__(self, client: Region, input_bytes: int) -> None:
        self.total_bytes: Final = input_bytes
        self._client = client
        self._pages = PageRuns(0, input_bytes // PAGE_BYTES)

    def allocate(self, nbytes: int) -> int | None:
        """Where a run of nbytes begins, from the region's start; None if there is no room now."""
        return self._pages.allocate(nbytes)

    def write(self, offset: int, pieces: list[bytes | bytearray | memoryview]) -> None:
        """Fill a run that is the caller's. OSError if the machine has no memory for it."""
        write_run(self._client.fd, offset, pieces)

    def free(self, offset: int, nbytes: int) -> None:
        """The run is not read any more."""
        self._pages.free(offset)
        end = offset + page_align(nbytes)
        if end > KEPT_BYTES and not self._client.closed:
            start = max(offset, KEPT_BYTES)
            punch_hole(self._client, SESSION_INPUT_OFFSET + start, end - start)
