"""shm.arena: blocks in and out on control's side, range checks on the worker's."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.arena import KEPT_BYTES, ArenaReader, InputArena, InputBlock, create_arena
from shm.errors import RegionCorrupt
from shm.layout import PAGE_BYTES, RegionKind
from shm.region import Backing, Region, attach_region, reopen_read_only

U64 = st.integers(0, 2**64 - 1)


def taken(arena: InputArena, nbytes: int) -> InputBlock:
    block = arena.allocate(nbytes)
    assert block is not None
    return block


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    with create_arena(8 * PAGE_BYTES, boot_id=bytes(16), backing=Backing.POSIX) as region:
        yield region


def test_what_control_writes_a_worker_reads(region: Region) -> None:
    arena = InputArena(region)
    with (
        attach_region(reopen_read_only(region.fd), RegionKind.ARENA, writable=False) as mapped,
        taken(arena, 5000) as block,
    ):
        block.view[:] = os.urandom(1) * 5000
        reader = ArenaReader(mapped)
        assert reader.view(block.offset, block.nbytes) == block.view
        assert reader.view(block.offset, block.nbytes).readonly


def test_a_full_arena_gives_none_and_recovers(region: Region) -> None:
    arena = InputArena(region)
    assert arena.total_bytes == 8 * PAGE_BYTES
    first = taken(arena, 6 * PAGE_BYTES)
    assert arena.allocate(3 * PAGE_BYTES) is None
    first.free()
    taken(arena, 8 * PAGE_BYTES).free()
    assert arena.statistics().free_bytes == arena.total_bytes


def test_leaving_with_frees_the_block_and_its_view(region: Region) -> None:
    arena = InputArena(region)
    with taken(arena, 10) as block:
        view = block.view
    assert arena.statistics().used_runs == 0
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_a_block_that_was_handed_over_is_its_new_owners_to_free(region: Region) -> None:
    arena = InputArena(region)
    with taken(arena, 10) as block:
        owned = block.hand_over()
    assert arena.statistics().used_runs == 1
    owned.free()
    with pytest.raises(ValueError, match="already free"):
        owned.free()
    assert arena.statistics().used_runs == 0


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 1), (PAGE_BYTES - 1, 2), (9 * PAGE_BYTES, 1), (9 * PAGE_BYTES + 1, 0),
        (PAGE_BYTES, 8 * PAGE_BYTES + 1), (PAGE_BYTES, 2**64 - PAGE_BYTES), (2**64 - 1, 2**64 - 1),
        (PAGE_BYTES, -1), (-1, 1),
    ],
)  # fmt: skip
def test_what_leaves_the_arena_is_corrupt(region: Region, offset: int, nbytes: int) -> None:
    with pytest.raises(RegionCorrupt):
        ArenaReader(region).view(offset, nbytes)


@settings(max_examples=300, deadline=None)
@given(offset=U64, nbytes=U64)
def test_any_two_words_give_exactly_those_bytes_or_corrupt(region: Region, offset: int, nbytes: int) -> None:
    inside = PAGE_BYTES <= offset <= region.size_bytes and nbytes <= region.size_bytes - offset
    try:
        view = ArenaReader(region).view(offset, nbytes)
    except RegionCorrupt:
        assert not inside
    else:
        assert inside
        assert len(view) == nbytes


def resident_bytes_of_shared_memory() -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssShmem:")]
    return int(line.split()[1]) * 1024


def test_a_large_block_leaves_the_resident_size_when_it_is_freed_and_its_bytes_stay() -> None:
    large_bytes = 32 << 20
    with create_arena(KEPT_BYTES + large_bytes, boot_id=bytes(16), backing=Backing.POSIX) as region:
        arena = InputArena(region)
        before_bytes = resident_bytes_of_shared_memory()
        block = taken(arena, KEPT_BYTES + large_bytes)
        block.view[:] = b"x" * block.nbytes
        last_byte = block.offset + block.nbytes - 1
        assert resident_bytes_of_shared_memory() - before_bytes >= block.nbytes
        block.free()
        assert resident_bytes_of_shared_memory() - before_bytes <= KEPT_BYTES
        assert region.view[last_byte] == ord("x")
