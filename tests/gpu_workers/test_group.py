"""Rank 0's side of a group; the test plays the other rank, through real rings."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from gpu_workers.errors import GroupBroken, ItemError, RanksDisagree
from gpu_workers.families.base import MediaItem, Rows
from gpu_workers.families.stub import StubFamily, stub_rows
from gpu_workers.group import DataRanks, WeightsRanks
from gpu_workers.jobs import InputRange, Item, Job
from gpu_workers.leader import Leader
from gpu_workers.own_forward import OwnForward
from shm.errors import ErrorCode
from shm.group import (
    GROUP_SLOT_COUNT,
    GroupLeader,
    GroupMember,
    Plan,
    PlanKind,
    Reply,
    ReplyKind,
    create_group,
)
from shm.layout import Dtype
from shm.region import Backing
from shm.segment import SegmentWriter, create_segment

_GUARD_NS = 60_000_000_000
ITEM_ROWS = 4
ALONE = OwnForward(lambda: 0)  # enters no collective
DATA = [f"stub rows={ITEM_ROWS} n={number}".encode() for number in range(4)]


class OtherRank:
    """Rank 1, whose every word is the test's."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member

    def take(self) -> Plan:
        """The next plan."""
        raw = self._member.plans.take(_GUARD_NS)
        assert raw is not None, "no plan came"
        return Plan.unpack(raw)

    def say(self, *replies: Reply) -> None:
        """Answer, also ahead of the question: who asks waits for it."""
        for reply in replies:
            assert self._member.replies.try_publish(reply.pack())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


@pytest.fixture
def rings(stack: ExitStack) -> tuple[Leader, OtherRank]:
    """A leader that does not listen yet, and the other rank."""
    region = stack.enter_context(create_group(2, boot_id=bytes(16), place=0, epoch=1, backing=Backing.MEMFD))
    return Leader(GroupLeader(region)), OtherRank(GroupMember(region, 1))


@pytest.fixture
def items(stack: ExitStack) -> list[Item]:
    """Four items of one job, with a block."""
    family = StubFamily()
    job = Job(ticket=5, deadline_ns=1, modality="image", input=InputRange(4096, 1000, 64))
    for data in DATA:
        media = MediaItem("image", (memoryview(data),))
        job.add_item(media, family.measure(media))
    job.lay_out_rows()
    region = stack.enter_context(
        create_segment(1 << 20, boot_id=bytes(16), place=0, epoch=1, backing=Backing.MEMFD)
    )
    writer = SegmentWriter(region)
    job.block = writer.allocate(job.rows * 1024, job.rows, 256, Dtype.FLOAT32, b"metadata")
    return job.items


def run(leader: Leader) -> ThreadPoolExecutor:
    """Rank 0's other threads, for calls that wait for the other rank."""
    leader.start()
    return ThreadPoolExecutor(1)


def prepared(plan: Plan, **changes: int) -> Reply:
    return Reply(ReplyKind.PREPARED, plan.ticket, plan.item, **changes)


def test_items_go_to_the_rank_with_the_least_to_do(
    rings: tuple[Leader, OtherRank], items: list[Item]
) -> None:
    leader, other = rings
    ranks = DataRanks(leader, StubFamily())
    with run(leader) as threads:
        own = ranks.preprocess(items[0])
        assert own.features["data"] == DATA[0]
        asked = threads.submit(ranks.preprocess, items[1])
        plan = other.take()
        assert plan == Plan(PlanKind.PREPARE, 5, 1, 4096, 1000, 64, ITEM_ROWS)
        other.say(prepared(plan))
        assert asked.result().features == {}, "the other rank keeps them"
        ranks.preprocess(items[2])  # both have the same to do
        asked = threads.submit(ranks.preprocess, items[3])
        plan = other.take()
        other.say(prepared(plan, error=ErrorCode.DECODE_FAILED, error_value=3))
        with pytest.raises(ItemError) as failed:
            asked.result()
        assert (failed.value.code, failed.value.value) == (ErrorCode.DECODE_FAILED, 3)


def test_each_rank_is_told_where_the_rows_of_its_items_go(
    rings: tuple[Leader, OtherRank], items: list[Item]
) -> None:
    leader, other = rings
    ranks = DataRanks(leader, StubFamily())
    with run(leader) as threads:
        for item in items:
            asked = threads.submit(ranks.preprocess, item)
            if item.index % 2:
                other.say(prepared(other.take()))
            item.prepared = asked.result()
    own, answers = ranks.hand_out(items)
    assert own == [items[0], items[2]]
    plans = [other.take() for _ in range(3)]
    block = items[0].job.block
    assert block is not None
    nbytes = ITEM_ROWS * 1024
    assert [(plan.kind, plan.item, plan.segment_offset, plan.nbytes) for plan in plans[:2]] == [
        (PlanKind.ITEM, index, block.offset + index * nbytes, nbytes) for index in (1, 3)
    ]
    assert (plans[2].kind, plans[2].item_count) == (PlanKind.FORWARD, 2)
    failure = Reply(ReplyKind.ITEM_FAILED, 5, 3, plans[2].batch, error=ErrorCode.FORWARD_FAILED)
    other.say(failure, Reply(ReplyKind.FORWARDED, batch=plans[2].batch))
    results = answers.wait()
    assert [(result.item.index, result.error and result.error.code) for result in results] == [
        (1, None),
        (3, ErrorCode.FORWARD_FAILED),
    ]


def test_the_ranks_forget_a_job_that_failed(rings: tuple[Leader, OtherRank], items: list[Item]) -> None:
    leader, other = rings
    for ranks in (DataRanks(leader, StubFamily()), WeightsRanks(leader, StubFamily(), ALONE)):
        ranks.forget(items[0].job)
        assert other.take() == Plan(PlanKind.FORGET, 5)


def test_a_rank_that_takes_no_plans_breaks_the_group(rings: tuple[Leader, OtherRank]) -> None:
    leader, _ = rings
    for ticket in range(GROUP_SLOT_COUNT):
        leader.forget(ticket)
    with pytest.raises(GroupBroken, match="rank 1"):
        leader.forget(0)


@pytest.mark.parametrize("here", ["rows", "error"])
@pytest.mark.parametrize("there", ["rows", "error"])
def test_ranks_that_share_weights_must_fare_alike(
    rings: tuple[Leader, OtherRank], items: list[Item], here: str, there: str
) -> None:
    leader, other = rings
    ranks = WeightsRanks(leader, StubFamily(), ALONE)

    def attempt() -> list[Rows]:
        for item in items:
            plan = other.take()
            assert (plan.kind, plan.item, plan.nbytes) == (PlanKind.ITEM, item.index, 0), "it writes nothing"
        forward = other.take()
        other.say(Reply(ReplyKind.FORWARDED, batch=forward.batch, failed=int(there == "error")))
        if here == "error":
            raise ValueError("poison")
        return [stub_rows(data) for data in DATA]

    leader.start()
    own, answers = ranks.hand_out(items)
    assert own == items
    if here == "rows":
        assert len(ranks.forward(items, attempt)) == len(items)
        if there == "rows":
            assert answers.wait() == []
        else:
            with pytest.raises(RanksDisagree, match="another rank"):
                answers.wait()
    elif there == "error":
        with pytest.raises(ValueError, match="poison"):
            ranks.forward(items, attempt)
        assert answers.wait() == []
    else:
        with pytest.raises(RanksDisagree, match="rank 0 alone"):
            ranks.forward(items, attempt)
