"""A group region: the rings between rank 0 of a tensor-parallel group and its other ranks.

GroupLeader is rank 0's end, GroupMember that of another rank, and control reads with `rank_failure` why a
rank gave up. One region for each launch; for each rank from 1 on it holds, one after the other:

    failure page     written by that rank: u64 length, UTF-8 words from +128 on
    plan ring        rank 0 publishes Plans, the rank takes them in order
    reply ring       the rank publishes Replies, rank 0 takes them

A rank's reply that a forward is finished is its done word: the release of the reply ring's tail comes after
the last row that the plan named was written. PAIRS: the acquire in rank 0's take, before rank 0 publishes.
"""

import struct
from enum import IntEnum, unique
from typing import Final, NamedTuple, Self

from shm import _core
from shm.errors import RegionCorrupt
from shm.layout import (
    CONSUMER_SIDE_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    RegionKind,
    page_align,
    producer_side_bytes,
)
from shm.region import Backing, Region, create_region

GROUP_SLOT_COUNT: Final = 4096  # of each ring; who takes from one never waits for anything else
BATCH_KEY_BYTES: Final = 16
_FAILURE_TEXT_OFFSET: Final = 128
_FAILURE_TEXT_BYTES: Final = PAGE_BYTES - _FAILURE_TEXT_OFFSET
_RING_BYTES: Final = CONSUMER_SIDE_BYTES + producer_side_bytes(GROUP_SLOT_COUNT)
_RANK_BYTES: Final = page_align(PAGE_BYTES + 2 * _RING_BYTES)


@unique
class PlanKind(IntEnum):
    """What rank 0 asks of another rank."""

    PREPARE = 1
    ITEM = 2
    FORWARD = 3
    FORGET = 4
    ABANDON = 5


_PLAN: Final = struct.Struct("<IQIQQIIQQQII56x")


class Plan(NamedTuple):
    """Rank 0 -> another rank. ticket and item (its place in the request) name an item.

    PREPARE: decode and preprocess the item, which will have `rows` rows; arena_offset, arena_nbytes and
    metadata_bytes are the request's, as in Submission. ITEM: it belongs to the next FORWARD; its rows go to
    the nbytes at segment_offset, or, if nbytes is 0, nowhere. FORWARD: the item_count items before it are
    batch number `batch`. FORGET: what is prepared of this ticket will never be asked for. ABANDON: the
    forward of this batch has failed on rank 0, after it had entered `collectives` collectives.
    """

    kind: PlanKind
    ticket: int = 0
    item: int = 0
    arena_offset: int = 0
    arena_nbytes: int = 0
    metadata_bytes: int = 0
    rows: int = 0
    segment_offset: int = 0
    nbytes: int = 0
    batch: int = 0
    item_count: int = 0
    collectives: int = 0

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _PLAN.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse a slot; RegionCorrupt for an unknown kind."""
        kind, *rest = _PLAN.unpack(raw)
        try:
            return cls(PlanKind(kind), *rest)
        except ValueError:
            raise RegionCorrupt(f"unknown plan kind {kind}") from None


assert _PLAN.size == SLOT_BYTES


@unique
class ReplyKind(IntEnum):
    """What a rank tells rank 0."""

    LOADED = 1
    PREPARED = 2
    ITEM_FAILED = 3
    FORWARDED = 4


_REPLY: Final = struct.Struct("<IQIQIIIQQ16s60x")


class Reply(NamedTuple):
    """Another rank -> rank 0.

    LOADED: its tower works, and it has mapped every region. PREPARED: the item is prepared, or `error` says
    why not. ITEM_FAILED: of batch `batch`, this item has no rows. FORWARDED: the batch is through, and every
    row that its plan named is written, but for the items that failed; or, if `failed` is 1, the whole forward
    raised, after this rank had entered `collectives` collectives. batch_key: equal for items that may share
    a forward.
    """

    kind: ReplyKind
    ticket: int = 0
    item: int = 0
    batch: int = 0
    error: int = 0
    failed: int = 0
    collectives: int = 0
    error_value: int = 0
    error_limit: int = 0
    batch_key: bytes = bytes(BATCH_KEY_BYTES)

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _REPLY.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse a slot; RegionCorrupt for an unknown kind."""
        kind, *rest = _REPLY.unpack(raw)
        try:
            return cls(ReplyKind(kind), *rest)
        except ValueError:
            raise RegionCorrupt(f"unknown reply kind {kind}") from None


assert _REPLY.size == SLOT_BYTES


def create_group(world_size: int, *, boot_id: bytes, place: int, epoch: int, backing: Backing) -> Region:
    """The region of a group of world_size ranks (at least 2). RegionUnavailable."""
    return create_region(
        RegionKind.GROUP,
        PAGE_BYTES + (world_size - 1) * _RANK_BYTES,
        boot_id=boot_id,
        place=place,
        epoch=epoch,
        capacity=world_size,
        payload_offset=PAGE_BYTES,
        backing=backing,
        label=f"group-{place}-{epoch}",
    )


def rank_failure(region: Region, rank: int) -> str:
    """Why this rank (from 1 on) gave up, in one line of its own words; empty if it left none."""
    start = _rank_offset(region, rank)
    nbytes = _core.word_load(region.memory, start)
    if nbytes > _FAILURE_TEXT_BYTES:
        raise RegionCorrupt(f"a failure of {nbytes} bytes")
    text = bytes(region.view[start + _FAILURE_TEXT_OFFSET : start + _FAILURE_TEXT_OFFSET + nbytes])
    return " ".join(text.decode(errors="replace").split())


class GroupLeader:
    """Rank 0's end. plans[rank - 1] is shared under a lock of theirs, replies[rank - 1] is one thread's."""

    def __init__(self, region: Region) -> None:
        self.world_size = region.header.capacity
        ranks = range(1, self.world_size)
        self.plans = [_producer(region, _rank_offset(region, rank) + PAGE_BYTES) for rank in ranks]
        self.replies = [
            _consumer(region, _rank_offset(region, rank) + PAGE_BYTES + _RING_BYTES) for rank in ranks
        ]


class GroupMember:
    """Another rank's end. `plans` is one thread's, `replies` is shared under a lock of the caller's."""

    def __init__(self, region: Region, rank: int) -> None:
        self._region = region
        self._start = _rank_offset(region, rank)
        self.plans = _consumer(region, self._start + PAGE_BYTES)
        self.replies = _producer(region, self._start + PAGE_BYTES + _RING_BYTES)

    def publish_failure(self, reason: str) -> None:
        """Leave why this rank gives up, cut to what fits; the process ends after it."""
        text = reason.encode()[:_FAILURE_TEXT_BYTES]
        start = self._start + _FAILURE_TEXT_OFFSET
        self._region.view[start : start + len(text)] = text
        # PAIRS: word_load in rank_failure.
        _core.word_store(self._region.memory, self._start, len(text))


def _rank_offset(region: Region, rank: int) -> int:
    if not 1 <= rank < region.header.capacity:
        raise ValueError(f"rank {rank} of {region.header.capacity} has no place in the group region")
    return PAGE_BYTES + (rank - 1) * _RANK_BYTES


def _producer(region: Region, ring: int) -> _core.Producer:
    memory = region.memory
    return _core.Producer(memory, ring + CONSUMER_SIDE_BYTES, memory, ring, GROUP_SLOT_COUNT)


def _consumer(region: Region, ring: int) -> _core.Consumer:
    memory = region.memory
    return _core.Consumer(memory, ring + CONSUMER_SIDE_BYTES, memory, ring, GROUP_SLOT_COUNT)
