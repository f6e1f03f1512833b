"""Everything that control says to one worker: the producing end of its submission ring.

An encode that finds the ring full stays with the dispatcher (backpressure). A cancel or a reclaim must not
be lost, so it waits here, in order, until the worker has made room: `flush` is called when the worker
reports something, before every encode, and by the supervisor's heartbeat.
"""

from collections import deque
from collections.abc import Callable

from shm._core import Producer
from shm.errors import RegionCorrupt
from shm.layout import Submission


class Outbox:
    """One worker's submissions. The backlog is bounded by what it refers to: the worker's tickets and blocks.

    on_corrupt(reason) is told when the worker's cursor is impossible; the ring counts as full then.
    """

    def __init__(self, ring: Producer, on_corrupt: Callable[[str], None]) -> None:
        self._ring = ring
        self._on_corrupt = on_corrupt
        self._backlog: deque[Submission] = deque()

    def try_publish(self, encode: Submission) -> bool:
        """Publish an encode; False when the ring is full, or when older orders still wait for room."""
        self.flush()
        return not self._backlog and self._try_publish(encode)

    def send(self, order: Submission) -> None:
        """Publish a cancel, a reclaim or a drain: now if there is room, else as soon as there is."""
        self._backlog.append(order)
        self.flush()

    def flush(self) -> None:
        """Publish what waits, in order, as far as there is room."""
        while self._backlog and self._try_publish(self._backlog[0]):
            self._backlog.popleft()

    @property
    def backlog(self) -> int:
        """How many orders wait for room in the ring."""
        return len(self._backlog)

    def _try_publish(self, descriptor: Submission) -> bool:
        try:
            return self._ring.try_publish(descriptor.pack())
        except RegionCorrupt as corrupt:
            self._on_corrupt(str(corrupt))
            return False
