"""What readers and control get to see of a job: block headers and completion records, in the right order.

A block's header always changes before the record that tells of it: whoever has the record finds the header.
Which job may be published when is the caller's affair (intake for SHAPE_KNOWN, backlog for the rest). A shape
that nobody waits for is no record of its own while its READY is about to follow: it is kept back until
`tell_shapes`, and never told if the ticket ends before.
"""

import logging
import threading
from collections.abc import Callable

from gpu_workers.errors import CompletionRingFull, ItemError
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.jobs import Job
from shm.layout import NO_BLOCK, Completion, CompletionKind
from shm.link import WorkerLink
from shm.segment import FillingBlock

logger = logging.getLogger(__name__)


class Publisher:
    """The one user of the completion ring. Methods may be called from any thread."""

    def __init__(
        self, link: WorkerLink, faults: Faults, on_failed: Callable[[Job], None] = lambda job: None
    ) -> None:
        """on_failed: told of every job that fails before that is published; must not wait."""
        self._on_failed = on_failed
        self._link = link
        self._faults = faults
        self._lock = threading.Lock()  # the ring has one producer, this worker has many threads
        self._untold: dict[int, Job] = {}  # by ticket: their SHAPE_KNOWN is kept back

    def shapes_known(self, jobs: list[Job]) -> None:
        """The jobs' blocks are FILLING and their metadata runs are written. Before any of them can end."""
        with self._lock:
            self._untold.update((job.ticket, job) for job in jobs if not job.is_streamed)
            self._publish([_record(job, CompletionKind.SHAPE_KNOWN) for job in jobs if job.is_streamed])

    def tell_shapes(self) -> None:
        """Publish what `shapes_known` kept back: control accounts for work that takes longer by its rows."""
        with self._lock:
            untold, self._untold = self._untold, {}
            self._publish([_record(job, CompletionKind.SHAPE_KNOWN) for job in untold.values()])

    def rows(self, job: Job, rows_ready: int) -> None:
        """The first rows_ready rows are in the block: readers may use them."""
        _block_of(job).publish_rows(rows_ready)

    def ended(self, jobs: list[Job]) -> None:
        """Each job has failed, or all its rows are in its block: its ticket ends."""
        records = [self._end(job) for job in jobs]
        with self._lock:
            for job in jobs:
                self._untold.pop(job.ticket, None)
            self._publish(records)
        for job in jobs:
            if job.error is None:
                self._faults.reach(FaultPoint.EXIT_AFTER_READY, job.asked_faults)

    def refused(self, ticket: int, error: ItemError, item_index: int = 0) -> None:
        """A ticket that never became a job ends with this error."""
        with self._lock:
            self._publish([_refusal(ticket, error, item_index)])

    def _end(self, job: Job) -> Completion:
        """The last change of the job's block, and the record that tells of it."""
        if job.error is None:
            self._faults.reach(FaultPoint.EXIT_BEFORE_READY, job.asked_faults)
            _block_of(job).ready()
            return _record(job, CompletionKind.READY)
        logger.info("ticket %d item %d failed: %s", job.ticket, job.error_item, job.error)
        self._on_failed(job)
        if job.block is None:
            return _refusal(job.ticket, job.error, job.error_item)
        job.block.fail()
        return _record(job, CompletionKind.FAILED)._replace(
            error=job.error.code,
            error_item=job.error_item,
            error_value=job.error.value,
            error_limit=job.error.limit,
        )

    def _publish(self, records: list[Completion]) -> None:
        """All together, so that control is woken once. Holds the lock."""
        if not records:
            return
        run = b"".join([record.pack() for record in records])
        if self._link.completions.try_publish_many(run) < len(records):
            raise CompletionRingFull(f"no slot for ticket {records[-1].ticket}")


def _refusal(ticket: int, error: ItemError, item_index: int) -> Completion:
    """The end of a ticket that never got a block. A block that a job has stays FAILED until its reclaim."""
    return Completion(
        CompletionKind.FAILED,
        ticket,
        block=NO_BLOCK,
        error=error.code,
        error_item=item_index,
        error_value=error.value,
        error_limit=error.limit,
    )


def _block_of(job: Job) -> FillingBlock:
    assert job.block is not None, "only jobs with a block are published"
    return job.block


def _record(job: Job, kind: CompletionKind) -> Completion:
    """The job's block and timings, as they are now."""
    block = _block_of(job)
    queue_us, preprocess_us, forward_us, copy_us = job.timings.microseconds()
    return Completion(
        kind,
        job.ticket,
        block=block.block,
        generation=block.generation,
        offset=block.offset,
        nbytes=block.nbytes,
        rows=block.rows,
        dim=block.dim,
        dtype=block.dtype,
        metadata_bytes=block.metadata_bytes,
        queue_us=queue_us,
        preprocess_us=preprocess_us,
        forward_us=forward_us,
        copy_us=copy_us,
        batch_items=job.timings.batch_items,
    )
