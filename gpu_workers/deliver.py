"""Copies rows from the device into their blocks and tells the backlog.

Where a copy takes its time (CUDA), or other ranks have a part of the batch, a thread of its own waits for it,
so that the copies of one batch run beside the next batch's forward. Where rows are there when the forward has
returned, the device thread copies and publishes them itself: a hand-over would cost more than the copy.
"""

import queue
import time
from dataclasses import dataclass
from typing import Protocol

from gpu_workers.backlog import Backlog, EncodeResult
from gpu_workers.device import Device, Mark
from gpu_workers.errors import ItemError
from gpu_workers.families.base import Rows
from gpu_workers.heart import Heart
from gpu_workers.jobs import Item
from gpu_workers.threads import start_thread


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the device made of an item: its rows (plan.rows, dim), or why there are none."""

    item: Item
    outcome: "Rows | ItemError"


class Answers(Protocol):
    """What other ranks of a group make of their items of a batch."""

    def wait(self) -> list[EncodeResult]:
        """Sleep until all have ended; their rows are in their blocks then. Raises if the group is broken."""


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch whose forward is asked for: its rows may be read once `finished` is reached."""

    encoded: list[Encoded]
    started_ns: int
    finished: Mark
    elsewhere: Answers


class Deliverer:
    """Delivers on the thread that asks for it. Batches in order, one at a time."""

    def __init__(self, backlog: Backlog, device: Device, heart: Heart) -> None:
        self._backlog = backlog
        self._device = device
        self._heart = heart

    def deliver(self, batch: EncodedBatch) -> None:
        """Returns when its rows are in their blocks and every ticket that this ends has ended."""
        with self._heart.step():
            results = [self._begin_copy(encoded, batch.finished) for encoded in batch.encoded]
            forward_end_ns = batch.finished.wait()
            self._device.finish_copies()
            results += batch.elsewhere.wait()
            copy_ns = time.monotonic_ns() - forward_end_ns
            self._backlog.bring_batch(results, forward_end_ns - batch.started_ns, copy_ns)

    def _begin_copy(self, encoded: Encoded, after: Mark) -> EncodeResult:
        item, outcome = encoded.item, encoded.outcome
        if isinstance(outcome, ItemError):
            return EncodeResult(item, outcome)
        block = item.job.block
        assert block is not None, "only jobs with a block reach the device"
        row_bytes = block.nbytes // block.rows
        first_byte = item.row_start * row_bytes
        target = block.payload[first_byte : first_byte + item.plan.rows * row_bytes]
        self._device.copy_rows(outcome, target, after)
        return EncodeResult(item)


class DeliverThread:
    """Delivers behind the device thread, which runs at most one batch ahead of the copies."""

    def __init__(self, deliverer: Deliverer) -> None:
        self._deliverer = deliverer
        self._batches: queue.Queue[EncodedBatch] = queue.Queue(maxsize=1)

    def start(self) -> None:
        """Begin to deliver; the thread lives as long as the process."""
        start_thread("deliver", self._run)

    def put(self, batch: EncodedBatch) -> None:
        """Hand over a batch; waits while the one before has not been taken up."""
        self._batches.put(batch)

    def _run(self) -> None:
        while True:
            self._deliverer.deliver(self._batches.get())
