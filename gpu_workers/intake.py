"""The intake thread: what control says through the submission ring.

Descriptors are taken as many as there are, and each step is done for all of them together, so that under load
nobody is woken for a single request. An ENCODE is taken at once (its slot is free again), checked, sized from
the items' headers and given a block, before any decode: that is what SHAPE_KNOWN tells. Items whose headers
do not tell are measured by the preprocess threads, so that nobody waits here for a decode; those whose
preprocessing costs less than a hand-over are preprocessed here. If the segment is full the job waits for
reclaim, oldest first; nobody overtakes, so a large one gets its turn.
"""

import logging
import threading
import time
from collections import deque
from typing import Final, NamedTuple

import msgspec

from gpu_workers.backlog import Backlog
from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, ItemPlan, MediaItem
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.heart import Heart
from gpu_workers.jobs import InputRange, Job
from gpu_workers.prepare import Preparer
from gpu_workers.publish import Publisher
from gpu_workers.request import MalformedRequest, media_item, read_metadata
from gpu_workers.threads import start_thread
from shm.arena import ArenaReader
from shm.errors import ErrorCode
from shm.layout import Submission, SubmissionKind, WorkerState
from shm.link import WorkerLink
from shm.segment import SegmentWriter

logger = logging.getLogger(__name__)

_SPACE_WAIT_NS: Final = 5_000_000_000  # a job waits this long for reclaim, then fails with SEGMENT_FULL
_RUN_SLOTS: Final = 32  # descriptors taken together: the first one waits for the last one's headers
_TICK_NS: Final = 100_000_000  # how often time-outs are looked at, and kept back shapes told


class _WaitingForSpace(NamedTuple):
    job: Job
    nbytes: int
    metadata: bytes
    until_ns: int


class Intake:
    """The one user of the submission ring and of the segment's allocator."""

    def __init__(
        self,
        link: WorkerLink,
        arena: ArenaReader,
        segment: SegmentWriter,
        family: Family,
        backlog: Backlog,
        publisher: Publisher,
        preparer: Preparer | None,
        heart: Heart,
        faults: Faults,
    ) -> None:
        """preparer: of items not worth a hand-over; None where preprocessing waits for other ranks."""
        self._link = link
        self._arena = arena
        self._segment = segment
        self._family = family
        self._info = family.info()
        self._backlog = backlog
        self._publisher = publisher
        self._preparer = preparer
        self._heart = heart
        self._faults = faults
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[_WaitingForSpace] = deque()
        self._next_tick_ns = 0
        self._finish = threading.Event()
        self._is_draining = False
        self._backlog_finished = False

    def start(self) -> None:
        """Begin to take; the thread lives as long as the process."""
        start_thread("intake", self._run)

    def request_finish(self) -> None:
        """Finish what is in hand, then let the backlog end. Safe in a signal handler."""
        self._finish.set()
        self._link.submissions.wake()

    def _run(self) -> None:
        while True:
            run = self._link.submissions.take_many(_RUN_SLOTS, _TICK_NS)
            with self._heart.step():
                self._take_up(run)
                while (job := self._backlog.take_measured()) is not None:
                    self._wait_for_space(job)
                if time.monotonic_ns() >= self._next_tick_ns:
                    self._tick()
                self._place_waiting()
            if self._finish.is_set():
                self._drain()

    def _take_up(self, run: bytes) -> None:
        """Descriptors, one behind the other."""
        jobs: list[Job] = []
        for submission in Submission.unpack_many(run):
            match submission.kind:
                case SubmissionKind.ENCODE:
                    jobs += self._begin(submission)
                case SubmissionKind.RECLAIM:
                    self._reclaim(submission.block, submission.generation)
                case SubmissionKind.CANCEL:
                    self._open(jobs)  # it may be about one of them
                    jobs = []
                    self._cancel(submission.ticket)
                case SubmissionKind.DRAIN:
                    self._finish.set()
        self._open(jobs)

    def _drain(self) -> None:
        """Nothing new comes: the backlog ends once nothing is left to take."""
        if not self._is_draining:
            self._is_draining = True
            self._link.set_state(WorkerState.DRAINING)
        if self._link.submissions.pending() == 0:
            self._backlog.finish()
            self._backlog_finished = True

    # --- ENCODE ---

    def _begin(self, submission: Submission) -> list[Job]:
        """The job of a request that makes sense; none, and its ticket has ended, of another."""
        input_range = InputRange(submission.arena_offset, submission.arena_nbytes, submission.metadata_bytes)
        job = Job(submission.ticket, submission.deadline_ns, input=input_range)
        try:
            self._read_request(submission, job)
        except ItemError as error:
            self._publisher.refused(job.ticket, error, len(job.items))
            return []
        self._faults.reach(FaultPoint.EXIT_ON_TAKE, job.asked_faults)
        return [job]

    def _open(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        self._backlog.open(*jobs)
        for job in jobs:
            if job.is_measured:
                self._wait_for_space(job)

    def _wait_for_space(self, job: Job) -> None:
        """Queue a measured job for a block."""
        job.lay_out_rows()
        metadata = self._encoder.encode(job.block_metadata())
        nbytes = job.rows * self._info.dim_of(job.modality) * self._info.dtype.itemsize
        if self._segment.fits(nbytes, len(metadata)):
            until_ns = time.monotonic_ns() + _SPACE_WAIT_NS
            self._waiting.append(_WaitingForSpace(job, nbytes, metadata, until_ns))
        else:
            total_bytes = self._segment.total_bytes
            self._backlog.fail(job, ItemError(ErrorCode.TOO_LARGE_FOR_SEGMENT, nbytes, total_bytes))

    def _read_request(self, submission: Submission, job: Job) -> None:
        """Add every item with its plan to the job. ItemError for the item that would be next."""
        job.is_streamed = submission.streamed != 0
        if self._backlog_finished:
            raise ItemError(ErrorCode.WORKER_LOST)  # control retries it elsewhere
        if submission.deadline_ns <= time.monotonic_ns():
            raise ItemError(ErrorCode.DEADLINE)
        block = self._arena.view(submission.arena_offset, submission.arena_nbytes)
        try:
            self._read_items(submission, block, job)
        except MalformedRequest as malformed:
            logger.error("ticket %d: %s", submission.ticket, malformed)
            raise ItemError(ErrorCode.INTERNAL) from None

    def _read_items(self, submission: Submission, block: memoryview, job: Job) -> None:
        request = read_metadata(block, submission.metadata_bytes)
        if len(request.items) != submission.item_count or not request.items:
            found = len(request.items)
            raise MalformedRequest(f"{submission.item_count} items announced, {found} found")
        job.modality = request.modality
        if request.modality not in self._info.modalities:
            raise ItemError(ErrorCode.MODALITY_UNSUPPORTED)
        for source in request.items:
            media = media_item(request.modality, source, block)
            job.add_item(media, self._inspect(job, media))

    def _inspect(self, job: Job, media: MediaItem) -> ItemPlan | None:
        try:
            return self._family.inspect(media)
        except ItemError:
            raise
        except Exception:  # parsers of foreign bytes may raise anything; one item is at stake
            logger.warning("ticket %d item %d: inspect failed", job.ticket, len(job.items), exc_info=True)
            raise ItemError(ErrorCode.INTERNAL) from None

    def _place_waiting(self) -> None:
        """Give blocks to the waiting jobs, oldest first, as far as there is space."""
        placed: list[Job] = []
        while self._waiting and self._place(self._waiting[0]):
            placed.append(self._waiting.popleft().job)
        if placed:
            self._publisher.shapes_known(placed)
            self._admit(placed)

    def _place(self, waiting: _WaitingForSpace) -> bool:
        """Give the job a block; False if there is no space now."""
        job, nbytes, metadata, _ = waiting
        dim = self._info.dim_of(job.modality)
        job.block = self._segment.allocate(nbytes, job.rows, dim, self._info.dtype, metadata)
        if job.block is None:
            return False
        self._faults.reach(FaultPoint.EXIT_BEFORE_SHAPE, job.asked_faults)
        return True

    def _admit(self, jobs: list[Job]) -> None:
        """Let them go on; what is not worth a hand-over is prepared here."""
        if self._preparer is None:
            self._backlog.admit(*jobs)
        elif here := self._backlog.admit(*jobs, at_once=True):
            self._backlog.bring_prepared([self._preparer.prepare(item) for item in here])

    # --- the others ---

    def _cancel(self, ticket: int) -> None:
        self._backlog.cancel(ticket)
        self._forget_ended()

    def _reclaim(self, block: int, generation: int) -> None:
        if not self._segment.reclaim(block, generation):
            logger.warning(
                "reclaim of block %d generation %d ignored: not ended, or stale", block, generation
            )

    def _tick(self) -> None:
        """Look at the clock: deadlines of the backlog, and both limits of those that wait for space."""
        now_ns = time.monotonic_ns()
        self._next_tick_ns = now_ns + _TICK_NS
        self._publisher.tell_shapes()
        self._backlog.drop_expired()
        for entry in self._waiting:
            if entry.until_ns <= now_ns and entry.job.error is None:
                self._backlog.fail(entry.job, ItemError(ErrorCode.SEGMENT_FULL))
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Jobs that failed while they waited for space need none."""
        self._waiting = deque(entry for entry in self._waiting if entry.job.error is None)
