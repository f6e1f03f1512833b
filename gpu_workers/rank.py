"""A rank of a tensor-parallel group other than rank 0: does what the plans say, in their order.

    plans ──▶ prepare-0..n ──▶ table of prepared items ──▶ device (main) ──▶ copy ──▶ done word

It has no link, no deadlines and no free list: all that is rank 0's. It maps the group's segment and writes
only the rows that a plan names. It ends when it is killed, with rank 0 at the latest.
"""

import logging
import queue
import signal
import threading
from dataclasses import dataclass
from typing import Final

from gpu_workers.deliver import Encoded
from gpu_workers.device import Device, Failure, Mark
from gpu_workers.errors import ConfigurationError, GroupBroken, ItemError
from gpu_workers.families.base import Family
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.group import batch_key_digest
from gpu_workers.isolation import Encoder
from gpu_workers.jobs import Item, ItemState, Job
from gpu_workers.loading import load_working
from gpu_workers.ranks import Alone
from gpu_workers.request import MalformedRequest, media_item, read_metadata
from gpu_workers.threads import EXIT_CONFIGURATION, EXIT_SOFTWARE, run_or_exit, start_thread
from shm.arena import ArenaReader
from shm.errors import ErrorCode, RegionCorrupt
from shm.group import GroupMember, Plan, PlanKind, Reply, ReplyKind
from shm.layout import RegionKind
from shm.messages import WorkerConfig
from shm.region import Region, attach_region

logger = logging.getLogger(__name__)

_TAKE_NS: Final = 1_000_000_000


def run_rank(config: WorkerConfig) -> int:
    """The rank's whole life. Returns, with the exit status, only if it cannot start."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # rank 0 finishes what the group has in hand, then we are killed
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
    plans = PlanIntake(member, items)
    for number in range(config.preprocess_threads):
        start_thread(f"prepare-{number}", Preparer(plans, items, arena, family, faults, replies).run)
    copier = Copier(segment, device, replies)
    start_thread("copy", copier.run)
    start_thread("plans", plans.run)
    logger.info("rank %d of %d is loaded on %s", config.rank, config.world_size, device.name)
    replies.publish(Reply(ReplyKind.LOADED))
    run_or_exit(RankLoop(config.tp_mode == "data", plans, items, family, device, faults, copier).run)
    return EXIT_SOFTWARE


def _give_up(member: GroupMember, reason: str, status: int) -> int:
    line = " ".join(reason.split())
    member.publish_failure(line)
    logger.critical("cannot start: %s", line)
    return status


class Replies:
    """The one user of the reply ring. Any thread."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._lock = threading.Lock()

    def publish(self, *replies: Reply) -> None:
        """In this order; GroupBroken if rank 0 does not take them."""
        with self._lock:
            for reply in replies:
                if not self._member.replies.try_publish(reply.pack()):
                    raise GroupBroken("rank 0 does not take replies")


class PreparedItems:
    """What waits for its forward, by ticket and index. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[tuple[int, int], Item] = {}

    def put(self, item: Item) -> None:
        """Keep a prepared item."""
        with self._lock:
            self._items[item.job.ticket, item.index] = item

    def get(self, plan: Plan) -> Item:
        """The item that a plan names. GroupBroken if it was never prepared."""
        with self._lock:
            item = self._items.get((plan.ticket, plan.item))
        if item is None:
            raise GroupBroken(f"ticket {plan.ticket} item {plan.item} is not prepared here")
        return item

    def drop(self, items: list[Item]) -> None:
        """These will not be asked for again."""
        with self._lock:
            for item in items:
                self._items.pop((item.job.ticket, item.index), None)

    def forget(self, ticket: int) -> None:
        """Nor any item of this ticket."""
        with self._lock:
            for key in [key for key in self._items if key[0] == ticket]:
                del self._items[key]


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """One forward: its items, in order, with where their rows go."""

    batch: int
    items: list[Plan]


class PlanIntake:
    """The one user of the plan ring. It never waits for anything else, so the ring never fills."""

    def __init__(self, member: GroupMember, items: PreparedItems) -> None:
        self.to_prepare: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self.to_forward: queue.SimpleQueue[ForwardPlan] = queue.SimpleQueue()
        self._member = member
        self._items = items
        self._named: list[Plan] = []  # ITEMs of the FORWARD to come

    def run(self) -> None:
        """For ever."""
        while True:
            raw = self._member.plans.take(_TAKE_NS)
            if raw is not None:
                self._take_up(Plan.unpack(raw))

    def _take_up(self, plan: Plan) -> None:
        match plan.kind:
            case PlanKind.PREPARE:
                self.to_prepare.put(plan)
            case PlanKind.ITEM:
                self._named.append(plan)
            case PlanKind.FORWARD:
                if plan.item_count != len(self._named):
                    raise GroupBroken(f"a batch of {plan.item_count} items names {len(self._named)}")
                self.to_forward.put(ForwardPlan(plan.batch, self._named))
                self._named = []
            case PlanKind.FORGET:
                self._items.forget(plan.ticket)


class Preparer:
    """A preprocess thread: item by item, each answered with PREPARED."""

    def __init__(
        self,
        plans: PlanIntake,
        items: PreparedItems,
        arena: ArenaReader,
        family: Family,
        faults: Faults,
        replies: Replies,
    ) -> None:
        self._plans = plans
        self._items = items
        self._arena = arena
        self._family = family
        self._faults = faults
        self._replies = replies

    def run(self) -> None:
        """For ever."""
        while True:
            plan = self._plans.to_prepare.get()
            self._replies.publish(self._prepare(plan))

    def _prepare(self, plan: Plan) -> Reply:
        reply = Reply(ReplyKind.PREPARED, plan.ticket, plan.item)
        try:
            item = self._prepared_item(plan)
        except ItemError as error:
            return reply._replace(error=error.code, error_value=error.value, error_limit=error.limit)
        except (RegionCorrupt, GroupBroken):
            raise
        except Exception:  # decoders and processors may raise anything; one item is at stake
            logger.warning("ticket %d item %d: preprocess failed", plan.ticket, plan.item, exc_info=True)
            return reply._replace(error=ErrorCode.INTERNAL)
        assert item.prepared is not None, "made above"
        self._items.put(item)
        return reply._replace(batch_key=batch_key_digest(item.prepared))

    def _prepared_item(self, plan: Plan) -> Item:
        """Measured and decoded anew from the request's bytes. GroupBroken if rank 0 measured otherwise."""
        block = self._arena.view(plan.arena_offset, plan.arena_nbytes)
        try:
            request = read_metadata(block, plan.metadata_bytes)
            if plan.item >= len(request.items):
                raise MalformedRequest(f"there are only {len(request.items)} items")
            media = media_item(request.modality, request.items[plan.item], block)
        except MalformedRequest as malformed:
            raise GroupBroken(f"ticket {plan.ticket} item {plan.item}: {malformed}") from None
        item_plan = self._family.inspect(media) or self._family.measure(media)
        if item_plan.rows != plan.rows:
            raise GroupBroken(f"{item_plan.rows} rows here, {plan.rows} on rank 0")
        self._faults.reach(FaultPoint.ERROR_IN_DECODE, (item_plan.fault,))
        prepared = self._family.preprocess(media, item_plan)
        job = Job(plan.ticket, deadline_ns=0, modality=request.modality)
        return Item(job, plan.item, media, item_plan, state=ItemState.PREPARED, prepared=prepared)


class RankLoop:
    """Runs the forwards on the main thread."""

    def __init__(
        self,
        isolates: bool,
        plans: PlanIntake,
        items: PreparedItems,
        family: Family,
        device: Device,
        faults: Faults,
        copier: "Copier",
    ) -> None:
        """isolates: whether this rank splits a batch that fails, which only one with whole weights may."""
        self._isolates = isolates
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

    def _forward(self, plan: ForwardPlan, items: list[Item]) -> "Forwarded":
        if self._isolates:
            encoded = self._encoder.encode(items)
        else:
            outcome = self._attempt(items)
            if outcome is None:
                return Forwarded(plan, None, self._device.mark())  # kept: rank 0 will ask for parts of it
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


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward that is asked of the device: its outcomes in the plan's order; None if the whole raised."""

    plan: ForwardPlan
    encoded: list[Encoded] | None
    finished: Mark


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
            self._replies.publish(Reply(ReplyKind.FORWARDED, batch=batch, failed=1))
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
