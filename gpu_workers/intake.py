"""The intake thread: what control says through the submission ring.

An ENCODE is taken at once (its slot is free again), checked, sized from the items' headers and given a block,
before any decode: that is what SHAPE_KNOWN tells. Items whose headers do not tell are measured by the
preprocess threads, so that nobody waits here for a decode. If the segment is full the job waits for reclaim,
oldest first; nobody overtakes, so a large one gets its turn.
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
_TICK_NS: Final = 100_000_000  # how often time-outs are looked at


class _WaitingForSpace(NamedTuple):
    job: Job
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
        heart: Heart,
        faults: Faults,
    ) -> None:
        self._link = link
        self._arena = arena
        self._segment = segment
        self._family = family
        self._info = family.info()
        self._backlog = backlog
        self._publisher = publisher
        self._heart = heart
        self._faults = faults
        self._waiting: deque[_WaitingForSpace] = deque()
        self._next_tick_ns = 0
        self._finish = threading.Event()
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
            descriptor = self._link.submissions.take(_TICK_NS)
            with self._heart.step():
                if descriptor is not None:
                    self._handle(Submission.unpack(descriptor))
                while (job := self._backlog.take_measured()) is not None:
                    self._wait_for_space(job)
                if time.monotonic_ns() >= self._next_tick_ns:
                    self._tick()
            if self._finish.is_set() and self._link.submissions.pending() == 0:
                self._backlog.finish()
                self._backlog_finished = True

    def _handle(self, submission: Submission) -> None:
        match submission.kind:
            case SubmissionKind.ENCODE:
                self._encode(submission)
            case SubmissionKind.CANCEL:
                self._cancel(submission.ticket)
            case SubmissionKind.RECLAIM:
                self._reclaim(submission.block, submission.generation)
            case SubmissionKind.DRAIN:
                self._link.set_state(WorkerState.DRAINING)
                self._finish.set()

    # --- ENCODE ---

    def _encode(self, submission: Submission) -> None:
        input_range = InputRange(submission.arena_offset, submission.arena_nbytes, submission.metadata_bytes)
        job = Job(submission.ticket, submission.deadline_ns, input=input_range)
        try:
            self._read_request(submission, job)
        except ItemError as error:
            self._publisher.refused(job.ticket, error, len(job.items))
            return
        self._faults.reach(FaultPoint.EXIT_ON_TAKE, job.asked_faults)
        self._backlog.open(job)
        if job.is_measured:
            self._wait_for_space(job)

    def _wait_for_space(self, job: Job) -> None:
        """Queue a measured job for a block; it may have one at once."""
        job.lay_out_rows()
        metadata = msgspec.msgpack.encode(job.block_metadata())
        try:
            self._check_fits(job, metadata)
        except ItemError as error:
            self._backlog.fail(job, error)
            return
        self._waiting.append(_WaitingForSpace(job, metadata, time.monotonic_ns() + _SPACE_WAIT_NS))
        self._place_waiting()

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

    def _payload_bytes(self, job: Job) -> int:
        return job.rows * self._info.dim_of(job.modality) * self._info.dtype.itemsize

    def _check_fits(self, job: Job, metadata: bytes) -> None:
        nbytes = self._payload_bytes(job)
        if not self._segment.fits(nbytes, len(metadata)):
            raise ItemError(ErrorCode.TOO_LARGE_FOR_SEGMENT, nbytes, self._segment.statistics().total_bytes)

    def _place_waiting(self) -> None:
        """Give blocks to the waiting jobs, oldest first, as far as there is space."""
        while self._waiting:
            job, metadata, _ = self._waiting[0]
            job.block = self._segment.allocate(
                self._payload_bytes(job),
                job.rows,
                self._info.dim_of(job.modality),
                self._info.dtype,
                metadata,
            )
            if job.block is None:
                return
            self._waiting.popleft()
            self._faults.reach(FaultPoint.EXIT_BEFORE_SHAPE, job.asked_faults)
            self._publisher.shape_known(job)
            self._backlog.admit(job)

    # --- the others ---

    def _cancel(self, ticket: int) -> None:
        self._backlog.cancel(ticket)
        self._forget_ended()
        self._place_waiting()

    def _reclaim(self, block: int, generation: int) -> None:
        if not self._segment.reclaim(block, generation):
            logger.warning(
                "reclaim of block %d generation %d ignored: not ended, or stale", block, generation
            )
        self._place_waiting()

    def _tick(self) -> None:
        """Look at the clock: deadlines of the backlog, and both limits of those that wait for space."""
        now_ns = time.monotonic_ns()
        self._next_tick_ns = now_ns + _TICK_NS
        self._backlog.drop_expired()
        for entry in self._waiting:
            if entry.until_ns <= now_ns and entry.job.error is None:
                self._backlog.fail(entry.job, ItemError(ErrorCode.SEGMENT_FULL))
        self._forget_ended()
        self._place_waiting()

    def _forget_ended(self) -> None:
        """Jobs that failed while they waited for space need none."""
        self._waiting = deque(entry for entry in self._waiting if entry.job.error is None)
