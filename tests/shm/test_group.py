"""shm.group: what ranks say to each other, through real rings."""

from collections.abc import Iterator

import pytest

from shm import _core
from shm.errors import RegionCorrupt
from shm.group import (
    GROUP_SLOT_COUNT,
    GroupLeader,
    GroupMember,
    Plan,
    PlanKind,
    Reply,
    ReplyKind,
    create_group,
    rank_failure,
)
from shm.region import Backing, Region

PLAN = Plan(PlanKind.ITEM, 1 << 40, 2, 3 << 30, 4, 5, 6, 7 << 33, 8, 9, 10, 11)
REPLY = Reply(ReplyKind.ITEM_FAILED, 1 << 40, 2, 3 << 33, 4, 1, 5, 6 << 33, 7, bytes(range(16)))


@pytest.fixture
def region() -> Iterator[Region]:
    """A group of three."""
    with create_group(3, boot_id=bytes(16), place=1, epoch=2, backing=Backing.MEMFD) as region:
        yield region


def test_plans_and_replies_survive_a_slot() -> None:
    assert Plan.unpack(PLAN.pack()) == PLAN
    assert Reply.unpack(REPLY.pack()) == REPLY


def test_an_unknown_kind_is_corrupt() -> None:
    with pytest.raises(RegionCorrupt, match="plan kind 77"):
        Plan.unpack((77).to_bytes(4, "little") + PLAN.pack()[4:])
    with pytest.raises(RegionCorrupt, match="reply kind 77"):
        Reply.unpack((77).to_bytes(4, "little") + REPLY.pack()[4:])


def test_each_rank_has_rings_of_its_own(region: Region) -> None:
    leader = GroupLeader(region)
    members = [GroupMember(region, rank) for rank in (1, 2)]
    assert leader.world_size == 3
    for rank, member in enumerate(members, 1):
        for batch in range(GROUP_SLOT_COUNT):
            assert leader.plans[rank - 1].try_publish(PLAN._replace(ticket=rank, batch=batch).pack())
        assert not leader.plans[rank - 1].try_publish(PLAN.pack()), "full"
        assert member.replies.try_publish(REPLY._replace(ticket=rank).pack())
    for rank, member in enumerate(members, 1):
        taken = [Plan.unpack(raw) for raw in iter(member.plans.try_take, None)]
        assert taken == [PLAN._replace(ticket=rank, batch=batch) for batch in range(GROUP_SLOT_COUNT)]
        raw = leader.replies[rank - 1].try_take()
        assert raw is not None
        assert Reply.unpack(raw).ticket == rank


def test_a_rank_leaves_why_it_gave_up(region: Region) -> None:
    GroupMember(region, 2).publish_failure("no such checkpoint: ä\nand more")
    assert rank_failure(region, 1) == ""
    assert rank_failure(region, 2) == "no such checkpoint: ä and more"
    GroupMember(region, 1).publish_failure("x" * 10_000)
    assert set(rank_failure(region, 1)) == {"x"}


def test_an_impossible_failure_is_corrupt(region: Region) -> None:
    _core.word_store(region.memory, 4096, 5000)  # rank 1's length
    with pytest.raises(RegionCorrupt, match="5000 bytes"):
        rank_failure(region, 1)


def test_rank_0_has_no_place_in_the_region(region: Region) -> None:
    for rank in (0, 3):
        with pytest.raises(ValueError, match=f"rank {rank} of 3"):
            GroupMember(region, rank)
