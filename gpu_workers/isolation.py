"""One forward and the isolation of items that break it: those fail alone, the others get their rows."""

import logging
from typing import Final

from gpu_workers.deliver import Encoded
from gpu_workers.device import Device, Failure
from gpu_workers.errors import DeviceLost, ItemError, RanksDisagree
from gpu_workers.families.base import Family, Prepared, Rows
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.jobs import Item
from gpu_workers.ranks import Ranks
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)

_FAULT_POINTS: Final = (
    FaultPoint.EXIT_IN_FORWARD,
    FaultPoint.HANG_IN_FORWARD,
    FaultPoint.ERROR_IN_FORWARD,
)
_CODES: Final = {
    Failure.ORDINARY: ErrorCode.FORWARD_FAILED,
    Failure.OUT_OF_MEMORY: ErrorCode.OUT_OF_DEVICE_MEMORY,
}


class Encoder:
    """Encodes batches on the device thread: of forward.py, or of a rank that does what rank 0 planned."""

    def __init__(self, family: Family, device: Device, faults: Faults, ranks: Ranks) -> None:
        self._family = family
        self._device = device
        self._faults = faults
        self._ranks = ranks
        self._info = family.info()

    def encode(self, batch: list[Item], *, halved: bool = False) -> list[Encoded]:
        """Rows or error of every item, in order. A batch that fails is split until the culprits stand alone.

        An ordinary failure is bisected. Out of memory is halved once and then tried item by item: what does
        not fit in half a batch will hardly fit in a quarter. DeviceLost if no forward can succeed any more.
        """
        try:
            outputs = self._ranks.forward(batch, lambda: self.attempt(batch))
            return [Encoded(item, rows) for item, rows in zip(batch, outputs, strict=True)]
        except RanksDisagree:
            raise
        except Exception as error:  # noqa: BLE001 - a tower may raise anything; judge says what it means
            failure = self.judge(error, batch)
        # Out of the except clause, so that the traceback no longer holds the failed forward's tensors.
        if failure is Failure.OUT_OF_MEMORY:
            self._device.free_cached_memory()
        if len(batch) == 1:
            return [Encoded(batch[0], ItemError(_CODES[failure]))]
        part_items = 1 if halved and failure is Failure.OUT_OF_MEMORY else (len(batch) + 1) // 2
        parts = [batch[start : start + part_items] for start in range(0, len(batch), part_items)]
        return [encoded for part in parts for encoded in self.encode(part, halved=True)]

    def attempt(self, batch: list[Item]) -> list[Rows]:
        """One forward of prepared items on this rank. Raises whatever the tower raises."""
        asked_faults = tuple([item.plan.fault for item in batch])
        for point in _FAULT_POINTS:
            self._faults.reach(point, asked_faults)
        outputs = self._family.forward([_prepared(item) for item in batch])
        for item, rows in zip(batch, outputs, strict=True):
            planned = (item.plan.rows, self._info.dim_of(item.job.modality))
            if tuple(rows.shape) != planned:
                raise ValueError(f"rows {tuple(rows.shape)} where {planned} were planned")
        return outputs

    def judge(self, error: Exception, batch: list[Item]) -> Failure:
        """What an exception of attempt means for the device. DeviceLost if it cannot be used any more."""
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


def _prepared(item: Item) -> Prepared:
    assert item.prepared is not None, "the backlog hands out prepared items"
    return item.prepared
