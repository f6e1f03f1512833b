"""What rank 0 tells another rank of its group, and what that rank answers. Used by rank.py.

The plan ring is taken by a thread that never waits for anything else, so it never fills; what is to do goes
into queues, in the order of the plans.
"""

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpu_workers.errors import GroupBroken
from gpu_workers.jobs import Item
from gpu_workers.own_forward import OwnForward
from gpu_workers.threads import start_thread
from shm.group import GroupMember, Plan, PlanKind, Reply

_TAKE_NS: Final = 1_000_000_000


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

    def __init__(self, member: GroupMember, items: PreparedItems, own: OwnForward | None) -> None:
        """own: of a rank that shares weights, its forward, which hears when rank 0's has failed."""
        self.to_prepare: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self.to_forward: queue.SimpleQueue[ForwardPlan] = queue.SimpleQueue()
        self._member = member
        self._items = items
        self._own = own
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
            case PlanKind.ABANDON:
                if self._own is None:
                    raise GroupBroken("only ranks that share weights abandon a batch together")
                start_thread("rank-0-failed", partial(self._own.watch, plan.batch, plan.collectives))
