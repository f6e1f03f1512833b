"""shm.pages: first fit, coalescing, and a long random run against a map of single pages."""

import random

import pytest

from shm.layout import PAGE_BYTES
from shm.pages import PageRuns


def test_runs_come_first_fit_and_page_aligned() -> None:
    pages = PageRuns(2, 10)
    assert pages.allocate(1) == 2 * PAGE_BYTES
    assert pages.allocate(PAGE_BYTES + 1) == 3 * PAGE_BYTES
    assert pages.allocate(7 * PAGE_BYTES) == 5 * PAGE_BYTES
    assert pages.allocate(1) is None
    assert pages.free_bytes == 0
    assert pages.largest_free_bytes == 0


def test_neighbours_become_one_run_whatever_the_order_of_freeing() -> None:
    for order in [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)]:
        pages = PageRuns(0, 3)
        runs = [pages.allocate(PAGE_BYTES) for _ in range(3)]
        for index in order:
            offset = runs[index]
            assert offset is not None
            pages.free(offset)
        assert pages.statistics().free_runs == 1
        assert pages.allocate(3 * PAGE_BYTES) == 0


def test_only_the_start_of_a_used_run_can_be_freed_and_only_once() -> None:
    pages = PageRuns(0, 8)
    offset = pages.allocate(2 * PAGE_BYTES)
    assert offset == 0
    for wrong in (1, PAGE_BYTES, 4 * PAGE_BYTES, -PAGE_BYTES):
        with pytest.raises(ValueError, match="no run in use"):
            pages.free(wrong)
    pages.free(0)
    with pytest.raises(ValueError, match="no run in use"):
        pages.free(0)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_has_at_least_one_byte(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        PageRuns(0, 8).allocate(nbytes)


def test_an_empty_allocator_has_nothing() -> None:
    assert PageRuns(5, 0).allocate(1) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_never_overlaps_and_ends_with_everything_free(seed: int) -> None:
    chance = random.Random(seed)
    first, count = 7, 200
    pages = PageRuns(first, count)
    used: dict[int, int] = {}
    owners = [0] * (first + count)
    for step in range(1, 3000):
        if used and chance.random() < 0.5:
            offset = chance.choice(list(used))
            pages.free(offset)
            length = used.pop(offset)
            start = offset // PAGE_BYTES
            owners[start : start + length] = [0] * length
        else:
            length = chance.randint(1, 20)
            run = pages.allocate(length * PAGE_BYTES)
            if run is None:
                assert pages.largest_free_bytes < length * PAGE_BYTES
                assert longest_zeros(owners[first:]) < length
                continue
            start = run // PAGE_BYTES
            assert start >= first
            assert owners[start : start + length] == [0] * length
            owners[start : start + length] = [step] * length
            used[run] = length
        assert pages.free_bytes == owners[first:].count(0) * PAGE_BYTES
    for offset in used:
        pages.free(offset)
    statistics = pages.statistics()
    assert (
        statistics.free_bytes == statistics.largest_free_bytes == statistics.total_bytes == count * PAGE_BYTES
    )
    assert (statistics.free_runs, statistics.used_runs) == (1, 0)


def longest_zeros(owners: list[int]) -> int:
    longest = run = 0
    for owner in owners:
        run = 0 if owner else run + 1
        longest = max(longest, run)
    return longest
