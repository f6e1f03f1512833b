"""What readers and control get to see of a job: block headers and completion records, in the right order.

A block's header always changes before the record that tells of it: whoever has the record finds the header.
Which job may be published when is the caller's affair (intake for SHAPE_KNOWN, backlog for the rest).
"""

import logging
import threading
from collections.abc import Callable

from gpu_workers.errors import CompletionRingFull, ItemError
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.jobs import Job, Timings
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

    def shape_known(self, job: Job) -> None:
        """The job's block is FILLING and its metadata run is written."""
        self._publish(_record(job, CompletionKind.SHAPE_KNOWN))

    def rows(self, job: Job, rows_ready: int) -> None:
        """The first rows_ready rows are in the block: readers may use them."""
        _block_of(job).publish_rows(rows_ready)

    def ready(self, job: Job) -> None:
        """All rows are in the block: the ticket ends well."""
        self._faults.reach(FaultPoint.EXIT_BEFORE_READY, job.asked_faults)
        _block_of(job).ready()
        self._publish(_record(job, CompletionKind.READY))
        self._faults.reach(FaultPoint.EXIT_AFTER_READY, job.asked_faults)

    def failed(self, job: Job) -> None:
        """The job's error ends the ticket; a block that it has stays FAILED until control reclaims it."""
        assert job.error is not None, "a job fails with an error"
        logger.info("ticket %d item %d failed: %s", job.ticket, job.error_item, job.error)
        self._on_failed(job)
        if job.block is None:
            self.refused(job.ticket, job.error, job.error_item)
            return
        job.block.fail()
        self._publish(
            _record(job, CompletionKind.FAILED)._replace(
                error=job.error.code,
                error_item=job.error_item,
                error_value=job.error.value,
                error_limit=job.error.limit,
            )
        )

    def refused(self, ticket: int, error: ItemError, item_index: int = 0) -> None:
        """A ticket that never got a block ends with this error."""
        self._publish(
            Completion(
                CompletionKind.FAILED,
                ticket,
                block=NO_BLOCK,
                error=error.code,
                error_item=item_index,
                error_value=error.value,
                error_limit=error.limit,
            )
        )

    def _publish(self, record: Completion) -> None:
        with self._lock:
            if record.kind is not CompletionKind.SHAPE_KNOWN:
                self._link.count_completed()
            if not self._link.completions.try_publish(record.pack()):
                raise CompletionRingFull(f"no slot for ticket {record.ticket}")


def _block_of(job: Job) -> FillingBlock:
    assert job.block is not None, "only jobs with a block are published"
    return job.block


def _record(job: Job, kind: CompletionKind) -> Completion:
    """The job's block and timings, as they are now."""
    block = _block_of(job)
    timings = job.timings
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
        queue_us=Timings.microseconds(timings.queue_ns),
        preprocess_us=Timings.microseconds(timings.preprocess_ns),
        forward_us=Timings.microseconds(timings.forward_ns),
        copy_us=Timings.microseconds(timings.copy_ns),
        batch_items=timings.batch_items,
    )
