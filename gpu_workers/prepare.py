"""The preprocess threads: encoded bytes -> what the tower takes, while the device runs the forward before."""

import logging
import time

from gpu_workers.backlog import Backlog
from gpu_workers.errors import GroupBroken, ItemError
from gpu_workers.families.base import Family
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.heart import Heart
from gpu_workers.jobs import Item
from gpu_workers.ranks import Ranks
from gpu_workers.threads import start_thread
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)


class PreparePool:
    """Threads that decode and preprocess whatever the backlog hands out next."""

    def __init__(self, backlog: Backlog, family: Family, ranks: Ranks, heart: Heart, faults: Faults) -> None:
        self._backlog = backlog
        self._family = family
        self._ranks = ranks
        self._heart = heart
        self._faults = faults

    def start(self, thread_count: int) -> None:
        """They end by themselves when the backlog is finished."""
        for number in range(thread_count):
            start_thread(f"prepare-{number}", self._run)

    def _run(self) -> None:
        while (item := self._backlog.take_to_prepare()) is not None:
            with self._heart.step():
                self._prepare(item)

    def _prepare(self, item: Item) -> None:
        """Measure the item or preprocess it, whichever is next for it."""
        started_ns = time.monotonic_ns()
        try:
            if item.known_plan is None:
                plan = self._family.measure(item.media)
                self._backlog.bring_measured(item, plan, time.monotonic_ns() - started_ns)
            else:
                self._faults.reach(FaultPoint.ERROR_IN_DECODE, (item.plan.fault,))
                prepared = self._ranks.preprocess(item)
                self._backlog.bring_prepared(item, prepared, time.monotonic_ns() - started_ns)
        except GroupBroken:
            raise
        except ItemError as error:
            self._backlog.drop_unprepared(item, error)
        except Exception:  # decoders and processors may raise anything; one item is at stake
            logger.warning("ticket %d item %d: preprocess failed", item.job.ticket, item.index, exc_info=True)
            self._backlog.drop_unprepared(item, ItemError(ErrorCode.INTERNAL))
