"""One launched worker process: what control knows of it, says to it and reads from it.

`app.place` launches and buries it; `app.dispatch` gives it attempts; `app.completions` takes what it reports.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from app.ranks import RankProcess, Ranks
from shm.errors import RegionCorrupt
from shm.layout import Submission, SubmissionKind, WorkerState

if TYPE_CHECKING:
    from app.inflight import Attempt
    from app.outbox import Outbox
    from app.segments import Block, Segment
    from shm.link import ControlLink

LINK_SLOT_COUNT = 1024  # of each ring of a link
CREDIT = LINK_SLOT_COUNT // 4  # tickets under way: two records each can never fill the completion ring

logger = logging.getLogger(__name__)


class WorkerCondition(StrEnum):
    """What control makes of a worker. Only a READY one is given work."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"  # condemned: it is being killed
    STOPPING = "stopping"


_CONDITIONS = {
    WorkerState.STARTING: WorkerCondition.STARTING,
    WorkerState.LOADING: WorkerCondition.LOADING,
    WorkerState.READY: WorkerCondition.READY,
    WorkerState.DRAINING: WorkerCondition.STOPPING,
    WorkerState.FAILED: WorkerCondition.STOPPING,
}


class Worker:
    """One process, or the ranks of one group, in one place and epoch.

    attempts: its tickets that have not ended, oldest first; outstanding_cost: rows that they stand for;
    shapeless: those without a block. is_slow: its work makes no progress; it gets no more. is_trusted:
    nothing impossible was found in what it wrote. ended resolves to the exit status (negative: the signal)
    once every process has been reaped, which is the proof of its death.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        link: ControlLink,
        segment: Segment,
        outbox: Outbox,
    ) -> None:
        self.place = segment.place
        self.epoch = segment.epoch
        self.link = link
        self.segment = segment
        self.outbox = outbox
        self.condition = WorkerCondition.STARTING
        self.reason = ""
        self.attempts: dict[int, Attempt] = {}
        self.outstanding_cost = 0
        self.shapeless = 0
        self.started_ns = time.monotonic_ns()
        self.ready_ns = 0
        self.has_served = False
        self.is_slow = False
        self.is_trusted = True
        self._ranks = Ranks(processes)
        self.ended = self._ranks.ended

    @property
    def pid(self) -> int:
        """The process id, of rank 0 in a group; reused by the kernel once `ended` is done."""
        return self._ranks.pids[0]

    @property
    def first_dead_rank(self) -> int:
        """The rank of its group whose death was its end; 0 for a worker of one process."""
        return self._ranks.first_dead

    @property
    def can_take_work(self) -> bool:
        """READY, with credit left (so that its completion ring cannot fill), and no order waits for room."""
        ready = self.condition is WorkerCondition.READY and not self.ended.done()
        return ready and len(self.attempts) < CREDIT and not self.outbox.backlog

    @property
    def has_room(self) -> bool:
        """Whether its segment will probably hold one more block beside those that its tickets still need."""
        segment = self.segment
        return segment.free_bytes >= (self.shapeless + 1) * segment.expected_run.nbytes

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether its end is what control wants: nothing that it has is to blame."""
        return self.condition is WorkerCondition.STOPPING

    def assign(self, attempt: Attempt) -> bool:
        """Register the attempt, then publish it; False, and forgotten again, when the ring is full."""
        job = attempt.flight.job
        self.attempts[attempt.ticket] = attempt
        published = self.outbox.try_publish(
            Submission(
                SubmissionKind.ENCODE,
                ticket=attempt.ticket,
                deadline_ns=attempt.flight.deadline_ns,
                arena_offset=job.block.offset,
                arena_nbytes=job.block.nbytes,
                metadata_bytes=job.metadata_bytes,
                item_count=job.item_count,
                streamed=job.wait == "shape",
            )
        )
        if published:
            self.outstanding_cost += attempt.cost
            self.shapeless += 1
        else:
            del self.attempts[attempt.ticket]
        return published

    def cancel(self, attempt: Attempt) -> None:
        """Ask for this attempt to be dropped. It still ends with a READY or a FAILED."""
        self.outbox.send(Submission(SubmissionKind.CANCEL, ticket=attempt.ticket))

    def shape_known(self, attempt: Attempt, block: Block) -> None:
        """The attempt has a block, whose rows are what it costs. Not called for one that is READY at once."""
        attempt.block = block
        self.outstanding_cost += block.rows - attempt.cost
        attempt.cost = block.rows
        self.shapeless -= 1

    def settle(self, attempt: Attempt) -> None:
        """The attempt has ended; its credit is free again."""
        del self.attempts[attempt.ticket]
        self.outstanding_cost -= attempt.cost
        self.shapeless -= attempt.block is None

    def observe(self) -> bool:
        """Read the worker's own word about itself; whether it changed what control makes of it."""
        if self.condition in (WorkerCondition.STALLED, WorkerCondition.STOPPING):
            return False
        before = self.condition
        try:
            self.condition = _CONDITIONS[self.link.state()]
        except RegionCorrupt as corrupt:
            self.distrust(str(corrupt))
        if self.condition is WorkerCondition.READY and not self.ready_ns:
            self.ready_ns = time.monotonic_ns()
        return self.condition is not before

    def check_progress(self, *, stall_ns: int, slow_ns: int, start_limit_ns: int) -> None:
        """Condemn it if it hangs: in its start, without a heartbeat, or in one step of its work. It is slow
        from slow_ns on."""
        heartbeat_ns, step_began_ns = self.link.heartbeat_ns(), self.link.oldest_step_ns()
        now_ns = time.monotonic_ns()
        if max(heartbeat_ns, step_began_ns) > now_ns:
            self.distrust("its heartbeat is from the future")
        elif self.condition in (WorkerCondition.STARTING, WorkerCondition.LOADING):
            if now_ns - self.started_ns > start_limit_ns:
                self.condemn("it did not become ready in time")
        elif self.condition in (WorkerCondition.READY, WorkerCondition.STOPPING):
            silent_ns = now_ns - max(heartbeat_ns, self.ready_ns)
            step_ns = now_ns - (step_began_ns or now_ns)
            self.is_slow = max(silent_ns, step_ns) > slow_ns
            if silent_ns > stall_ns:
                self.condemn("its heartbeat stopped")
            elif step_ns > stall_ns:
                self.condemn("one step of its work does not end")

    def condemn(self, reason: str) -> None:
        """Kill it. Its tickets and blocks stay as they are until its death is proved."""
        if self.condition is WorkerCondition.STALLED:
            return
        logger.error("worker %d.%d (pid %d) is condemned: %s", self.place, self.epoch, self.pid, reason)
        self.condition = WorkerCondition.STALLED
        self.reason = reason
        self.send_signal(signal.SIGKILL)

    def distrust(self, reason: str) -> None:
        """Condemn it for something impossible in what it wrote: nothing more is read from it."""
        self.is_trusted = False
        self.condemn(reason)

    def stop(self) -> None:
        """Ask it to end what it has and to exit."""
        self.condition = WorkerCondition.STOPPING
        self.outbox.send(Submission(SubmissionKind.DRAIN))
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every process that has not been reaped. Of a group only rank 0 heeds SIGTERM."""
        self._ranks.send_signal(number)
