"""Everything that control says to one worker: the producing end of its submission ring.

What is said in one turn of the event loop is published together at its end, so that the worker is woken once.
An encode that finds the ring full stays with the dispatcher (backpressure). A cancel or a reclaim must not
be lost, so it waits here, in order, until the worker has made room: that is looked for when the worker
reports something, with the next order, and by the supervisor's heartbeat.
"""

import asyncio
from collections.abc import Callable

from shm._core import Producer
from shm.errors import RegionCorrupt
from shm.layout import SLOT_BYTES, Submission


class Outbox:
    """One worker's submissions. What waits is bounded by what it refers to: the worker's tickets and blocks.

    on_corrupt(reason) is told when the worker's cursor is impossible; the ring counts as full then.
    """

    def __init__(self, ring: Producer, on_corrupt: Callable[[str], None]) -> None:
        self._ring = ring
        self._on_corrupt = on_corrupt
        self._run = bytearray()  # whole slots, not published yet
        self._waiting = 0  # how many
        self._room = 0  # free slots when last looked at, less what was published since: there may be more
        self._is_flush_due = False

    def try_publish(self, encode: Submission) -> bool:
        """Publish an encode at the end of this turn; False when there is no room for it behind the others."""
        if not self._has_room_for(self._waiting + 1):
            return False
        self._add(encode)
        return True

    def send(self, order: Submission) -> None:
        """Publish a cancel, a reclaim or a drain: with this turn's run, or as soon as there is room."""
        self._add(order)

    def flush_soon(self) -> None:
        """Publish what waits at the end of this turn of the loop, if anything does."""
        if self._waiting and not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Publish what waits, in order, as far as there is room."""
        self._is_flush_due = False
        if not self._waiting:
            return
        try:
            published = self._ring.try_publish_many(self._run)
        except RegionCorrupt as corrupt:
            self._on_corrupt(str(corrupt))
            return
        del self._run[: published * SLOT_BYTES]
        self._waiting -= published
        self._room = max(0, self._room - published)

    @property
    def backlog(self) -> int:
        """How many orders the ring has no room for."""
        return 0 if self._has_room_for(self._waiting) else self._waiting - self._room

    def _add(self, descriptor: Submission) -> None:
        self._run += descriptor.pack()
        self._waiting += 1
        self.flush_soon()

    def _has_room_for(self, count: int) -> bool:
        """Whether so many slots are free; only control fills them, so what was free once still is."""
        if self._room < count:
            self._room = self._free_slots()
        return self._room >= count

    def _free_slots(self) -> int:
        try:
            return self._ring.free_slots()
        except RegionCorrupt as corrupt:
            self._on_corrupt(str(corrupt))
            return 0
