"""The preprocess threads of a rank: from a plan to an item that waits for its forward. Used by rank.py."""

import logging

from gpu_workers.errors import GroupBroken, ItemError
from gpu_workers.families.base import Family
from gpu_workers.faults import FaultPoint, Faults
from gpu_workers.group import batch_key_digest
from gpu_workers.jobs import Item, ItemState, Job
from gpu_workers.rank_plans import PlanIntake, PreparedItems, Replies
from gpu_workers.request import MalformedRequest, media_item, read_metadata
from shm.arena import ArenaReader
from shm.errors import ErrorCode, RegionCorrupt
from shm.group import Plan, Reply, ReplyKind

logger = logging.getLogger(__name__)


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
