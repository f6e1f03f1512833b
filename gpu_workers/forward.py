"""The device thread: forwards, one batch after the other, and the isolation of items that break them."""

import logging
import time
from typing import Final

from gpu_workers.backlog import Backlog
from gpu_workers.deliver import Deliverer, Encoded, EncodedBatch
from gpu_workers.device import Device, Failure
from gpu_workers.errors import DeviceLost, ItemError
from gpu_workers.families.base import Family, Prepared
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.heart import Heart
from gpu_workers.jobs import Item
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)


class DeviceLoop:
    """Runs on the main thread until the backlog is finished."""

    def __init__(
        self,
        backlog: Backlog,
        family: Family,
        device: Device,
        deliverer: Deliverer,
        heart: Heart,
        faults: Faults,
    ) -> None:
        self._backlog = backlog
        self._family = family
        self._device = device
        self._deliverer = deliverer
        self._heart = heart
        self._faults = faults
        self._info = family.info()

    def run(self) -> None:
        """Forward what waits, at once. DeviceLost when the device's context is broken."""
        while (batch := self._backlog.take_batch()) is not None:
            self._deliverer.put(self._encode_batch(batch))

    def _encode_batch(self, batch: list[Item]) -> EncodedBatch:
        with self._heart.step():
            started_ns = time.monotonic_ns()
            return EncodedBatch(self.encode(batch), started_ns, self._device.mark())

    def encode(self, batch: list[Item], *, halved: bool = False) -> list[Encoded]:
        """Rows or error of every item, in order. A batch that fails is split until the culprits stand alone.

        An ordinary failure is bisected. Out of memory is halved once and then tried item by item: what does
        not fit in half a batch will hardly fit in a quarter. DeviceLost if no forward can succeed any more.
        """
        try:
            return self._forward(batch)
        except Exception as error:  # noqa: BLE001 - a tower may raise anything; _judge says what it means
            failure = self._judge(error, batch)
        # Out of the except clause, so that the traceback no longer holds the failed forward's tensors.
        if failure is Failure.OUT_OF_MEMORY:
            self._device.free_cached_memory()
        if len(batch) == 1:
            return [Encoded(batch[0], ItemError(_CODES[failure]))]
        part_items = 1 if halved and failure is Failure.OUT_OF_MEMORY else (len(batch) + 1) // 2
        parts = [batch[start : start + part_items] for start in range(0, len(batch), part_items)]
        return [encoded for part in parts for encoded in self.encode(part, halved=True)]

    def _forward(self, batch: list[Item]) -> list[Encoded]:
        for item in batch:
            for point in _FAULT_POINTS:
                self._faults.reach(point, (item.plan.fault,))
        outputs = self._family.forward([_prepared(item) for item in batch])
        for item, rows in zip(batch, outputs, strict=True):
            planned = (item.plan.rows, self._info.dim_of(item.job.modality))
            if tuple(rows.shape) != planned:
                raise ValueError(f"rows {tuple(rows.shape)} where {planned} were planned")
        return [Encoded(item, rows) for item, rows in zip(batch, outputs, strict=True)]

    def _judge(self, error: Exception, batch: list[Item]) -> Failure:
        failure = self._device.failure(error)
        tickets = sorted({item.job.ticket for item in batch})
        is_culprit = len(batch) == 1 or failure is Failure.STICKY
        logger.warning(
            "forward of tickets %s failed: %s, %s",
            tickets,
            failure.name,
            type(error).__name__,
            exc_info=error if is_culprit else None,
        )
        if failure is Failure.STICKY:
            raise DeviceLost(f"{self._device.name}: {type(error).__name__}") from error
        return failure


_FAULT_POINTS: Final = (
    FaultPoint.EXIT_IN_FORWARD,
    FaultPoint.HANG_IN_FORWARD,
    FaultPoint.ERROR_IN_FORWARD,
)
_CODES: Final = {
    Failure.ORDINARY: ErrorCode.FORWARD_FAILED,
    Failure.OUT_OF_MEMORY: ErrorCode.OUT_OF_DEVICE_MEMORY,
}


def _prepared(item: Item) -> Prepared:
    assert item.prepared is not None, "the backlog hands out prepared items"
    return item.prepared
