"""A rank of a tensor-parallel group other than rank 0: does what the plans say, in their order.

    plans ──▶ prepare-0..n ──▶ table of prepared items ──▶ device (main) ──▶ copy ──▶ done word

It has no link, no deadlines and no free list: all that is rank 0's. It maps the group's segment and writes
only the rows that a plan names. It ends when it is killed, with rank 0 at the latest.
"""

import logging
import signal

from gpu_workers.deliver import Encoded
from gpu_workers.device import Device, Failure
from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import Family
from gpu_workers.faults import Faults
from gpu_workers.group import own_forward
from gpu_workers.isolation import Encoder
from gpu_workers.jobs import Item
from gpu_workers.loading import load_working
from gpu_workers.own_forward import OwnForward
from gpu_workers.rank_copy import Copier, Forwarded
from gpu_workers.rank_plans import ForwardPlan, PlanIntake, PreparedItems, Replies
from gpu_workers.rank_prepare import Preparer
from gpu_workers.ranks import Alone
from gpu_workers.threads import EXIT_CONFIGURATION, EXIT_SOFTWARE, run_or_exit, start_thread
from shm.arena import ArenaReader
from shm.group import GroupMember, Reply, ReplyKind
from shm.layout import RegionKind
from shm.messages import WorkerConfig
from shm.region import attach_region

logger = logging.getLogger(__name__)


def run_rank(config: WorkerConfig) -> int:
    """The rank's whole life. Returns, with the exit status, only if it cannot start."""
    # Rank 0 finishes what the group has in hand; when it has ended, control kills this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arena = ArenaReader(attach_region(config.arena_fd, RegionKind.ARENA, writable=False))
    segment = attach_region(config.segment_fd, RegionKind.SEGMENT, writable=True)
    member = GroupMember(attach_region(config.group_fd, RegionKind.GROUP, writable=True), config.rank)
    try:
        faults = Faults(config.faults)
        family, device = load_working(config, segment)
    except ConfigurationError as error:
        return _give_up(member, str(error), EXIT_CONFIGURATION)
    except Exception as error:  # loading runs foreign code; whatever it raises ends the start
        logger.debug("load failed", exc_info=True)
        return _give_up(member, f"{type(error).__name__}: {error}", EXIT_SOFTWARE)
    replies = Replies(member)
    items = PreparedItems()
    own = None if config.tp_mode == "data" else own_forward()
    plans = PlanIntake(member, items, own)
    for number in range(config.preprocess_threads):
        start_thread(f"prepare-{number}", Preparer(plans, items, arena, family, faults, replies).run)
    copier = Copier(segment, device, replies)
    start_thread("copy", copier.run)
    start_thread("plans", plans.run)
    logger.info("rank %d of %d is loaded on %s", config.rank, config.world_size, device.name)
    replies.publish(Reply(ReplyKind.LOADED))
    run_or_exit(RankLoop(own, plans, items, family, device, faults, copier).run)
    return EXIT_SOFTWARE


def _give_up(member: GroupMember, reason: str, status: int) -> int:
    line = " ".join(reason.split())
    member.publish_failure(line)
    logger.critical("cannot start: %s", line)
    return status


class RankLoop:
    """Runs the forwards on the main thread."""

    def __init__(
        self,
        own: OwnForward | None,
        plans: PlanIntake,
        items: PreparedItems,
        family: Family,
        device: Device,
        faults: Faults,
        copier: Copier,
    ) -> None:
        """own: of a rank that shares weights. None: it has whole weights, and splits a batch that fails."""
        self._own = own
        self._plans = plans
        self._items = items
        self._device = device
        self._copier = copier
        self._encoder = Encoder(family, device, faults, Alone(family))

    def run(self) -> None:
        """For ever. DeviceLost when the device's context is broken."""
        while True:
            plan = self._plans.to_forward.get()
            items = [self._items.get(named) for named in plan.items]
            self._copier.put(self._forward(plan, items))

    def _forward(self, plan: ForwardPlan, items: list[Item]) -> Forwarded:
        if self._own is None:
            encoded = self._encoder.encode(items)
        else:
            with self._own.of(plan.batch):
                outcome = self._attempt(items)
            if outcome is None:  # kept: rank 0 will ask for parts of it
                return Forwarded(plan, None, self._device.mark(), self._own.collectives())
            encoded = outcome
        self._items.drop(items)
        return Forwarded(plan, encoded, self._device.mark())

    def _attempt(self, items: list[Item]) -> list[Encoded] | None:
        try:
            rows = self._encoder.attempt(items)
            return [Encoded(item, its_rows) for item, its_rows in zip(items, rows, strict=True)]
        except Exception as error:  # noqa: BLE001 - a tower may raise anything; judge says what it means
            failure = self._encoder.judge(error, items)
        if failure is Failure.OUT_OF_MEMORY:
            self._device.free_cached_memory()
        return None
