"""The copy thread of a rank: rows from the device into the group's segment, then the done word."""

import queue
from dataclasses import dataclass

from gpu_workers.deliver import Encoded
from gpu_workers.device import Device, Mark
from gpu_workers.errors import ItemError
from gpu_workers.rank_plans import ForwardPlan, Replies
from shm.errors import RegionCorrupt
from shm.group import Plan, Reply, ReplyKind
from shm.region import Region


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward that is asked of the device: its outcomes in the plan's order; None if the whole raised."""

    plan: ForwardPlan
    encoded: list[Encoded] | None
    finished: Mark
    collectives: int = 0  # that this rank had entered when the whole raised


class Copier:
    """Copies the rows that a plan names into the segment, then says so. Runs beside the next forward."""

    def __init__(self, segment: Region, device: Device, replies: Replies) -> None:
        self._segment = segment
        self._device = device
        self._replies = replies
        self._batches: queue.Queue[Forwarded] = queue.Queue(maxsize=1)

    def put(self, forwarded: Forwarded) -> None:
        """Hand over; waits while the one before has not been taken up."""
        self._batches.put(forwarded)

    def run(self) -> None:
        """For ever."""
        while True:
            self._copy(self._batches.get())

    def _copy(self, forwarded: Forwarded) -> None:
        batch = forwarded.plan.batch
        if forwarded.encoded is None:
            failed = Reply(ReplyKind.FORWARDED, batch=batch, failed=1, collectives=forwarded.collectives)
            self._replies.publish(failed)
            return
        failures: list[Reply] = []
        for named, encoded in zip(forwarded.plan.items, forwarded.encoded, strict=True):
            if isinstance(encoded.outcome, ItemError):
                failures.append(_failure(named, batch, encoded.outcome))
            elif named.nbytes:
                self._device.copy_rows(encoded.outcome, self._rows(named), forwarded.finished)
        forwarded.finished.wait()
        self._device.finish_copies()
        # The done word comes after every row. PAIRS: rank 0 takes it before it publishes the block.
        self._replies.publish(*failures, Reply(ReplyKind.FORWARDED, batch=batch))

    def _rows(self, named: Plan) -> memoryview:
        start, payload = named.segment_offset, self._segment.header.payload_offset
        if not payload <= start <= self._segment.size_bytes - named.nbytes:
            raise RegionCorrupt(f"rows of {named.nbytes} bytes at {start} lie outside the segment's payload")
        return self._segment.view[start : start + named.nbytes]


def _failure(named: Plan, batch: int, error: ItemError) -> Reply:
    return Reply(
        ReplyKind.ITEM_FAILED,
        named.ticket,
        named.item,
        batch,
        error=error.code,
        error_value=error.value,
        error_limit=error.limit,
    )
