"""A link: the ring pair and the status words between control and one worker launch.

ControlLink is control's end, WorkerLink the worker's; both map the same region. Control writes the
submission ring, the worker everything else (one writer per byte: see layout).
"""

import time

import msgspec

from shm import _core
from shm.errors import RegionCorrupt
from shm.layout import (
    LINK_HEARTBEAT_OFFSET,
    LINK_INFO_BYTES_OFFSET,
    LINK_INFO_CAPACITY_BYTES,
    LINK_INFO_OFFSET,
    LINK_OLDEST_STEP_OFFSET,
    LINK_STATE_OFFSET,
    RegionKind,
    WorkerState,
    link_bytes,
    link_completion_offsets,
    link_submission_offsets,
)
from shm.messages import WorkerInfo
from shm.region import Backing, Region, create_region


def create_link(slot_count: int, boot_id: bytes, place: int, epoch: int, backing: Backing) -> Region:
    """The region of a link whose two rings have slot_count slots (a power of two) each."""
    return create_region(
        RegionKind.LINK,
        link_bytes(slot_count),
        boot_id=boot_id,
        place=place,
        epoch=epoch,
        capacity=slot_count,
        backing=backing,
        label=f"link-{place}-{epoch}",
    )


class ControlLink:
    """Control's end. `submissions` rings the worker's futex; `completions` is armed from the event loop.

    eventfd: the completion ring's bell; the worker rings it, control's loop watches it, its owner closes it.
    """

    def __init__(self, region: Region, eventfd: int) -> None:
        slot_count = region.header.capacity
        producer, consumer = link_submission_offsets()
        self.submissions = _core.Producer(region.memory, producer, region.memory, consumer, slot_count)
        producer, consumer = link_completion_offsets(slot_count)
        self.completions = _core.Consumer(region.memory, producer, region.memory, consumer, slot_count)
        self.eventfd = eventfd
        self._region = region

    def state(self) -> WorkerState:
        """What the worker says of itself. RegionCorrupt for a number that is no state."""
        word = self._word(LINK_STATE_OFFSET)
        try:
            return WorkerState(word)
        except ValueError:
            raise RegionCorrupt(f"unknown worker state {word}") from None

    def heartbeat_ns(self) -> int:
        """CLOCK_MONOTONIC of the last heartbeat, 0 before the first; from a broken worker, anything."""
        return self._word(LINK_HEARTBEAT_OFFSET)

    def oldest_step_ns(self) -> int:
        """When the oldest decode or forward under way began (CLOCK_MONOTONIC), 0 when idle."""
        return self._word(LINK_OLDEST_STEP_OFFSET)

    def info(self) -> WorkerInfo:
        """What a READY worker said of itself. RegionCorrupt if it is no WorkerInfo."""
        try:
            return msgspec.msgpack.decode(self._info_run(), type=WorkerInfo)
        except msgspec.MsgspecError:
            raise RegionCorrupt("the worker's info run cannot be decoded") from None

    def failure(self) -> str:
        """Why a FAILED worker gave up: one line of its own words, for the log; empty if it left none."""
        return " ".join(self._info_run().decode(errors="replace").split())

    def _word(self, offset: int) -> int:
        # PAIRS: word_store in WorkerLink.
        return _core.word_load(self._region.memory, offset)

    def _info_run(self) -> bytes:
        nbytes = self._word(LINK_INFO_BYTES_OFFSET)
        if nbytes > LINK_INFO_CAPACITY_BYTES:
            raise RegionCorrupt(f"an info run of {nbytes} bytes")
        return bytes(self._region.view[LINK_INFO_OFFSET : LINK_INFO_OFFSET + nbytes])


class WorkerLink:
    """The worker's end. `submissions` is taken by one thread; `completions` is shared under a lock of theirs.

    eventfd: control's bell, inherited by the worker.
    """

    def __init__(self, region: Region, eventfd: int) -> None:
        slot_count = region.header.capacity
        producer, consumer = link_submission_offsets()
        self.submissions = _core.Consumer(region.memory, producer, region.memory, consumer, slot_count)
        producer, consumer = link_completion_offsets(slot_count)
        self.completions = _core.Producer(
            region.memory, producer, region.memory, consumer, slot_count, eventfd
        )
        self._region = region

    def set_state(self, state: WorkerState) -> None:
        """Publish the state and wake control; whatever info or failure belongs to it was published before."""
        self._store(LINK_STATE_OFFSET, state)
        self.completions.ring()

    def heartbeat(self, oldest_step_ns: int) -> None:
        """I am alive now; the oldest step under way began then (CLOCK_MONOTONIC ns, 0 when idle)."""
        self._store(LINK_OLDEST_STEP_OFFSET, oldest_step_ns)
        self._store(LINK_HEARTBEAT_OFFSET, time.monotonic_ns())

    def publish_info(self, info: WorkerInfo) -> None:
        """Leave what control may know; set_state(READY) comes after it. ValueError if it is too long."""
        self._publish_run(msgspec.msgpack.encode(info))

    def publish_failure(self, reason: str) -> None:
        """Leave why this worker gives up, cut to what fits; set_state(FAILED) comes after it."""
        cut = reason.encode()[:LINK_INFO_CAPACITY_BYTES]
        self._publish_run(cut.decode(errors="ignore").encode())

    def _publish_run(self, run: bytes) -> None:
        if len(run) > LINK_INFO_CAPACITY_BYTES:
            raise ValueError(f"an info run of {len(run)} bytes, at most {LINK_INFO_CAPACITY_BYTES} fit")
        self._region.view[LINK_INFO_OFFSET : LINK_INFO_OFFSET + len(run)] = run
        self._store(LINK_INFO_BYTES_OFFSET, len(run))

    def _store(self, offset: int, value: int) -> None:
        # PAIRS: word_load in ControlLink.
        _core.word_store(self._region.memory, offset, value)
