"""Preprocessing: encoded bytes -> what the tower takes, while the device runs the forward before.

Threads do it (PreparePool), except where it costs less than the hand-over to one (ItemPlan.prepares_at_once).
"""

import logging
import time

from gpu_workers.backlog import Backlog, PrepareResult
from gpu_workers.errors import GroupBroken, ItemError
from gpu_workers.families.base import Family, ItemPlan
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.heart import Heart
from gpu_workers.jobs import Item
from gpu_workers.ranks import Ranks
from gpu_workers.threads import start_thread
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)


class Preparer:
    """Measures and preprocesses single items; what they raise concerns them alone. Any thread."""

    def __init__(self, family: Family, ranks: Ranks, faults: Faults) -> None:
        self._family = family
        self._ranks = ranks
        self._faults = faults

    def measure(self, item: Item) -> ItemPlan | ItemError:
        """The size of an item whose header did not tell it."""
        try:
            return self._family.measure(item.media)
        except ItemError as error:
            return error
        except Exception:  # parsers of foreign bytes may raise anything; one item is at stake
            logger.warning("ticket %d item %d: measuring failed", item.job.ticket, item.index, exc_info=True)
            return ItemError(ErrorCode.INTERNAL)

    def prepare(self, item: Item) -> PrepareResult:
        """The item's features, or why it has none."""
        started_ns = time.monotonic_ns()
        try:
            self._faults.reach(FaultPoint.ERROR_IN_DECODE, (item.plan.fault,))
            prepared = self._ranks.preprocess(item)
            return PrepareResult(item, prepared, time.monotonic_ns() - started_ns)
        except GroupBroken:
            raise
        except ItemError as error:
            return PrepareResult(item, error)
        except Exception:  # decoders and processors may raise anything; one item is at stake
            logger.warning("ticket %d item %d: preprocess failed", item.job.ticket, item.index, exc_info=True)
            return PrepareResult(item, ItemError(ErrorCode.INTERNAL))


class PreparePool:
    """Threads that measure and preprocess whatever the backlog hands out next."""

    def __init__(self, backlog: Backlog, preparer: Preparer, heart: Heart) -> None:
        self._backlog = backlog
        self._preparer = preparer
        self._heart = heart

    def start(self, thread_count: int) -> None:
        """They end by themselves when the backlog is finished."""
        for number in range(thread_count):
            start_thread(f"prepare-{number}", self._run)

    def _run(self) -> None:
        while (item := self._backlog.take_to_prepare()) is not None:
            with self._heart.step():
                if item.known_plan is None:
                    self._measure(item)
                else:
                    self._backlog.bring_prepared([self._preparer.prepare(item)])

    def _measure(self, item: Item) -> None:
        started_ns = time.monotonic_ns()
        plan = self._preparer.measure(item)
        if isinstance(plan, ItemError):
            self._backlog.bring_prepared([PrepareResult(item, plan)])
        else:
            self._backlog.bring_measured(item, plan, time.monotonic_ns() - started_ns)
