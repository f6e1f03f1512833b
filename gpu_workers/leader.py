"""Rank 0's talk with the other ranks: plans go out in order, replies resolve the futures of those who asked.

Whoever waits for a future does so inside a step of the heart: a rank that hangs ends as a stalled worker, and
one that dies takes the whole group with it, because control kills the rest. So no wait here lasts for ever.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from gpu_workers.errors import GroupBroken, ItemError
from gpu_workers.jobs import Item
from gpu_workers.own_forward import OwnForward
from gpu_workers.threads import start_thread
from shm.errors import ErrorCode
from shm.group import GroupLeader, Plan, PlanKind, Reply, ReplyKind

_TAKE_NS: Final = 1_000_000_000


class PrepareReply(NamedTuple):
    """How a rank fared with preparing an item."""

    error: ItemError | None
    batch_key: bytes


@dataclass(slots=True)
class ForwardReply:
    """How a rank fared with a batch: which items have no rows, or that the whole forward raised."""

    errors: dict[tuple[int, int], ItemError] = field(default_factory=dict)  # by (ticket, index)
    failed: bool = False
    collectives: int = 0  # that it had entered when it failed


class Leader:
    """One thread listens to each rank. Methods may be called from any thread, `forward` from one."""

    def __init__(self, group: GroupLeader, own: OwnForward | None = None) -> None:
        """own: of a group that shares weights, rank 0's forward, which hears of those that fail elsewhere."""
        self._own = own
        self.others = range(1, group.world_size)
        self._group = group
        self._lock = threading.Lock()  # the plan rings have one producer each; guards what is below too
        self._loaded: list[Future[None]] = [Future() for _ in self.others]
        self._preparing: dict[tuple[int, int, int], Future[PrepareReply]] = {}  # by rank, ticket, index
        self._forwarding: dict[tuple[int, int], Future[ForwardReply]] = {}  # by rank, batch
        self._replies: dict[tuple[int, int], ForwardReply] = {}  # of batches whose FORWARDED is to come
        self._last_batch = 0

    def start(self) -> None:
        """Begin to listen; the threads live as long as the process."""
        for rank in self.others:
            start_thread(f"rank-{rank}", partial(self._listen, rank))

    def wait_loaded(self) -> None:
        """Until every rank's tower works. Control limits how long a start may take."""
        for loaded in self._loaded:
            loaded.result()

    def prepare(self, rank: int, item: Item) -> Future[PrepareReply]:
        """Ask a rank to prepare the item. Until the future is done it reads the item's bytes in the arena."""
        place = item.job.input
        answer: Future[PrepareReply] = Future()
        with self._lock:
            self._preparing[rank, item.job.ticket, item.index] = answer
            self._tell(
                rank,
                Plan(
                    PlanKind.PREPARE,
                    item.job.ticket,
                    item.index,
                    arena_offset=place.offset,
                    arena_nbytes=place.nbytes,
                    metadata_bytes=place.metadata_bytes,
                    rows=item.plan.rows,
                ),
            )
        return answer

    def forward(self, rank: int, items: list[Item], *, writes: bool) -> Future[ForwardReply]:
        """Ask a rank to forward prepared items and, if it writes, to put their rows into their blocks."""
        with self._lock:
            self._last_batch += 1
            return self._ask_forward(rank, self._last_batch, items, writes=writes)

    def forward_together(self, items: list[Item]) -> tuple[int, list[Future[ForwardReply]]]:
        """Ask every rank to forward prepared items with its share of the weights. The batch's number too."""
        with self._lock:
            self._last_batch += 1
            return self._last_batch, [
                self._ask_forward(rank, self._last_batch, items, writes=False) for rank in self.others
            ]

    def abandon(self, batch: int, collectives: int) -> None:
        """Tell every rank that rank 0's forward of this batch has failed after so many collectives."""
        with self._lock:
            for rank in self.others:
                self._tell(rank, Plan(PlanKind.ABANDON, batch=batch, collectives=collectives))

    def forget(self, ticket: int) -> None:
        """Tell every rank that nothing more of this ticket will be asked for."""
        with self._lock:
            for rank in self.others:
                self._tell(rank, Plan(PlanKind.FORGET, ticket))

    def _ask_forward(self, rank: int, batch: int, items: list[Item], *, writes: bool) -> Future[ForwardReply]:
        """Under the lock."""
        answer: Future[ForwardReply] = Future()
        self._forwarding[rank, batch] = answer
        self._replies[rank, batch] = ForwardReply()
        for item in items:
            self._tell(rank, _item_plan(item, writes=writes))
        self._tell(rank, Plan(PlanKind.FORWARD, batch=batch, item_count=len(items)))
        return answer

    def _tell(self, rank: int, plan: Plan) -> None:
        if not self._group.plans[rank - 1].try_publish(plan.pack()):
            raise GroupBroken(f"rank {rank} does not take its plans")

    def _listen(self, rank: int) -> None:
        while True:
            raw = self._group.replies[rank - 1].take(_TAKE_NS)
            if raw is not None:
                self._hear(rank, Reply.unpack(raw))

    def _hear(self, rank: int, reply: Reply) -> None:
        """A reply to what was never asked is a KeyError, which ends this process and with it the group."""
        match reply.kind:
            case ReplyKind.LOADED:
                self._loaded[rank - 1].set_result(None)
            case ReplyKind.PREPARED:
                with self._lock:
                    prepared = self._preparing.pop((rank, reply.ticket, reply.item))
                prepared.set_result(PrepareReply(_error(reply), reply.batch_key))
            case ReplyKind.ITEM_FAILED:
                error = _error(reply)
                assert error is not None, "an item fails with an error"
                self._replies[rank, reply.batch].errors[reply.ticket, reply.item] = error
            case ReplyKind.FORWARDED:
                with self._lock:
                    forwarded = self._forwarding.pop((rank, reply.batch))
                    outcome = self._replies.pop((rank, reply.batch))
                outcome.failed, outcome.collectives = bool(reply.failed), reply.collectives
                if reply.failed and self._own is not None:
                    watch = partial(self._own.watch, reply.batch, reply.collectives)
                    start_thread(f"rank-{rank}-failed", watch)
                forwarded.set_result(outcome)


def _item_plan(item: Item, *, writes: bool) -> Plan:
    named = Plan(PlanKind.ITEM, item.job.ticket, item.index, rows=item.plan.rows)
    if not writes:
        return named
    block = item.job.block
    assert block is not None, "only jobs with a block reach the device"
    row_bytes = block.nbytes // block.rows
    return named._replace(
        segment_offset=block.offset + item.row_start * row_bytes, nbytes=item.plan.rows * row_bytes
    )


def _error(reply: Reply) -> ItemError | None:
    if reply.error == 0:
        return None
    try:
        code = ErrorCode(reply.error)
    except ValueError:
        raise GroupBroken(f"unknown error code {reply.error}") from None
    return ItemError(code, reply.error_value, reply.error_limit)
