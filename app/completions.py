"""What workers report, taken from their completion rings and checked before anything is believed.

The bell of a worker's ring is an eventfd that the event loop watches (`app.place` registers it). A record
that does not agree with the private in-flight table, or with the block's header, condemns the worker.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.errors import RequestError, from_worker
from app.inflight import Outcome
from app.jobs import Encoded, Timings
from app.worker import LINK_SLOT_COUNT
from shm.errors import ErrorCode, RegionCorrupt
from shm.layout import NO_BLOCK, SLOT_BYTES, BlockState, Completion, CompletionKind
from shm.messages import Handle

if TYPE_CHECKING:
    from app.inflight import Attempt, Flight, Inflight
    from app.leases import Leases
    from app.segments import Block, Segments
    from app.worker import Worker

# Of items that the worker may never have looked at.
UNTRIED = frozenset({ErrorCode.CANCELLED, ErrorCode.DEADLINE, ErrorCode.WORKER_LOST})
DRAIN_MAX = 64  # records taken before the event loop has its turn again


@dataclass(frozen=True, slots=True)
class HandleOrigin:
    """What all handles of this boot have in common: its id in hexadecimal, and the attach socket's path."""

    boot_id: str
    attach: str


@dataclass(frozen=True, slots=True)
class CompletionStatistics:
    """Records taken since the start, by outcome. dropped: those of failed whose client had gone or whose
    deadline had passed before their forward."""

    shapes: int
    ready: int
    failed: int
    dropped: int


class Completions:
    """Ends attempts with what their workers report.

    on_progress is called after each drain that took any; on_given_back for a flight that its worker could not
    finish, and another may.
    """

    def __init__(
        self,
        inflight: Inflight,
        leases: Leases,
        segments: Segments,
        origin: HandleOrigin,
        on_progress: Callable[[], None],
        on_given_back: Callable[[Flight], None],
    ) -> None:
        self._inflight = inflight
        self._leases = leases
        self._segments = segments
        self._origin = origin
        self._on_progress = on_progress
        self._on_given_back = on_given_back
        self._dropped = 0
        self._taken = dict.fromkeys(CompletionKind, 0)
        self._settle_by_kind = {
            CompletionKind.SHAPE_KNOWN: self._shape_known,
            CompletionKind.READY: self._ready,
            CompletionKind.FAILED: self._failed,
        }

    def answer_bell(self, worker: Worker) -> None:
        """The loop saw the worker's eventfd."""
        with suppress(BlockingIOError):
            os.eventfd_read(worker.link.eventfd)
        self.drain(worker)

    def drain(self, worker: Worker) -> None:
        """Take up to DRAIN_MAX records; then sleep, armed, or have another turn soon."""
        if worker.ended.done():
            return  # what is left is taken by `drain_rest`
        if self._take(worker, DRAIN_MAX) or not self._arm(worker):
            asyncio.get_running_loop().call_soon(self.drain, worker)

    def drain_rest(self, worker: Worker) -> None:
        """After proof of death: all that it published before it died."""
        self._take(worker, LINK_SLOT_COUNT)

    def answer_late_joiner(self, flight: Flight) -> None:
        """One who joins a flight whose shape was given out already has it at once."""
        if flight.given is not None and flight.given.block is not None:
            self._answer_shape(flight.given, flight.given.block)

    def statistics(self) -> CompletionStatistics:
        """Counts since the start."""
        taken = self._taken
        return CompletionStatistics(
            taken[CompletionKind.SHAPE_KNOWN],
            taken[CompletionKind.READY],
            taken[CompletionKind.FAILED],
            self._dropped,
        )

    def _take(self, worker: Worker, limit: int) -> bool:
        """Take and settle up to limit records; whether the limit was reached."""
        if not worker.is_trusted:
            return False
        slots = b""
        try:
            slots = worker.link.completions.take_many(limit, 0)
            for record in Completion.unpack_many(slots):
                self._settle(worker, record)
        except RegionCorrupt as corrupt:
            worker.distrust(str(corrupt))
        if slots:
            self._on_progress()
            worker.outbox.flush_soon()  # what found the ring full
        return len(slots) == limit * SLOT_BYTES

    def _arm(self, worker: Worker) -> bool:
        try:
            return worker.link.completions.arm()
        except RegionCorrupt as corrupt:
            worker.distrust(str(corrupt))
            return True

    def _settle(self, worker: Worker, record: Completion) -> None:
        attempt = worker.attempts.get(record.ticket)
        if attempt is None:
            raise RegionCorrupt(f"ticket {record.ticket} is not one of this worker's")
        self._settle_by_kind[record.kind](worker, attempt, record)
        self._taken[record.kind] += 1

    def _shape_known(self, worker: Worker, attempt: Attempt, record: Completion) -> None:
        """The block is being filled: those who asked for the shape have their answer."""
        if attempt.block is not None:
            raise RegionCorrupt(f"ticket {attempt.ticket} has a second shape")
        block = worker.segment.admit(record, attempt)
        worker.shape_known(attempt, block)
        self._inflight.costs.learn(attempt.flight.job, block.rows)
        flight = attempt.flight
        if flight.job.wait == "shape" and flight.is_wanted and flight.decides(attempt):
            self._give_shape(attempt, block)

    def _give_shape(self, attempt: Attempt, block: Block) -> None:
        """Handles name the block from here on: what another attempt would do is of no use."""
        flight = attempt.flight
        flight.given = attempt
        for rival in flight.attempts:
            if rival is not attempt:
                rival.worker.cancel(rival)
        self._answer_shape(attempt, block)

    def _answer_shape(self, attempt: Attempt, block: Block) -> None:
        attempt.flight.answer(Outcome(block, "shape", Timings(), attempt.number), self._encoded)

    def _ready(self, worker: Worker, attempt: Attempt, record: Completion) -> None:
        """The block is whole: everybody who waits has a lease on it. It goes back if nobody does, because
        all have left or because another attempt was first."""
        flight = attempt.flight
        if attempt.block is None:  # the usual case: nobody waited for its shape
            block = worker.segment.admit(record, attempt)
            self._inflight.costs.learn(flight.job, block.rows)
        else:
            block = attempt.block
            worker.segment.confirm(block, record, BlockState.READY)
        self._inflight.attempt_ended(attempt)
        worker.has_served = True
        flight.is_harmless = True
        block.attempt = None
        if flight.decides(attempt):
            self._inflight.conclude(flight)
            timings = Timings(
                record.queue_us, record.preprocess_us, record.forward_us, record.copy_us, record.batch_items
            )
            flight.answer(Outcome(block, "ready", timings, attempt.number), self._encoded)
        self._leases.block_ended(block)

    def _failed(self, worker: Worker, attempt: Attempt, record: Completion) -> None:
        """The encode ended without rows: everybody who waits has the reason."""
        block = attempt.block
        if block is not None:
            worker.segment.confirm(block, record, BlockState.FAILED)
        self._inflight.attempt_ended(attempt)
        self._count_dropped(record)
        error = from_worker(record.error, record.error_item, record.error_value, record.error_limit)
        flight = attempt.flight
        flight.is_harmless |= record.error not in UNTRIED
        if flight.decides(attempt):
            self._end_or_try_again(flight, error, record.error)
        if block is not None:
            block.attempt = None
            self._leases.block_ended(block)
        elif record.block != NO_BLOCK:
            self._segments.reclaim_run(worker.segment, record.block, record.generation)

    def _end_or_try_again(self, flight: Flight, error: RequestError, code: int) -> None:
        # What is wrong with an item is so on every worker; for anything else the other attempt may do better.
        if flight.attempts and error.item_index is None and flight.given is None:
            return
        if not flight.attempts and flight.given is None and _is_no_verdict(flight, code):
            self._on_given_back(flight)
            return
        self._inflight.conclude(flight)
        flight.fail(error)

    def _count_dropped(self, record: Completion) -> None:
        self._dropped += record.error in (ErrorCode.CANCELLED, ErrorCode.DEADLINE)

    def _encoded(self, outcome: Outcome) -> Encoded:
        """One answer about a block, with a lease and a handle of its own."""
        block = outcome.block
        segment = block.segment
        handle = Handle(
            boot_id=self._origin.boot_id,
            segment=segment.place,
            epoch=segment.epoch,
            block=block.index,
            generation=block.generation,
            offset=block.offset,
            nbytes=block.nbytes,
            rows=block.rows,
            dim=block.dim,
            dtype=block.dtype.label,
            nonce=self._leases.grant(block),
            attach=self._origin.attach,
        )
        return Encoded(
            handle, block.metadata, block.rows, block.dim, block.nbytes, block.dtype, outcome.state,
            outcome.timings, segment.place, outcome.attempt,
        )  # fmt: skip


def _is_no_verdict(flight: Flight, code: int) -> bool:
    """Whether the worker only had no time for it: it was told to stop, or somebody with a later deadline
    joined since."""
    if code == ErrorCode.WORKER_LOST:
        return flight.is_wanted
    return code == ErrorCode.DEADLINE and flight.is_wanted and flight.deadline_ns > time.monotonic_ns()
