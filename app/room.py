"""Whether a segment has room for one more request, before anybody knows how large it will be.

`app.segments` keeps one for each segment. Control learns a request's rows only from its worker, but what
cannot fit should not be admitted: so the smallest of the runs reported lately stands for the next one.
"""

from collections import deque
from typing import Final

from shm.layout import PAGE_BYTES

WINDOW: Final = 64


class ExpectedRun:
    """The smallest of the last runs, in bytes."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._smallest = PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """What the next request will need at least, as far as the last ones can tell."""
        return self._smallest

    def learn(self, run_bytes: int) -> None:
        """A worker has reported a run of this size."""
        self._recent.append(run_bytes)
        self._smallest = min(self._recent)

    def doubt(self) -> None:
        """A request was refused on this ground: the oldest run counts no longer. So a segment that was full
        of large runs tries a small one again after a while, even if no reader lets go of anything."""
        if self._recent:
            self._recent.popleft()
        self._smallest = min(self._recent, default=PAGE_BYTES)
