"""Everything that control says to one worker: the producing end of its submission ring.

An encode that finds the ring full stays with the dispatcher (backpressure). A cancel or a reclaim must not
be lost, so it waits here, in order, until the worker has made room: `flush` is called when the worker
reports something, before every encode, and by the supervisor's heartbeat.
"""

from collections import deque

from shm._core import Producer
from shm.layout import Submission


class Outbox:
    """One worker's submissions. Bounded by what it refers to: the worker's tickets and blocks."""

    def __init__(self, ring: Producer) -> None:
        self._ring = ring
        self._backlog: deque[Submission] = deque()

    def has_room(self) -> bool:
        """Whether an encode published now is certain to find a slot."""
        self.flush()
        return not self._backlog and self._ring.free_slots() > 0

    def try_publish(self, encode: Submission) -> bool:
        """Publish an encode; False when the ring is full."""
        return self._ring.try_publish(encode.pack())

    def send(self, order: Submission) -> None:
        """Publish a cancel, a reclaim or a drain: now if there is room, else as soon as there is."""
        self._backlog.append(order)
        self.flush()

    def flush(self) -> None:
        """Publish what waits, in order, as far as there is room."""
        while self._backlog and self._ring.try_publish(self._backlog[0].pack()):
            self._backlog.popleft()

    @property
    def backlog(self) -> int:
        """How many orders wait for room in the ring."""
        return len(self._backlog)
