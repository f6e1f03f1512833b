"""The block protocol: right rows or StaleHandle, never another request's, and nobody waits for ever."""

import pytest

from tests.model.block_model import BlockDesign, Half, block_model
from tests.model.explorer import Exploration, explore
from tests.model.memory import ALL_MEMORIES, UNORDERED, VIEWS, X86, Memory
from tests.model.program import Order

EVERYWHERE = frozenset({X86, UNORDERED, VIEWS})
WEAK = frozenset({UNORDERED, VIEWS})

# What breaks it, and the memory models that must notice.
BROKEN_BLOCKS = {
    "READY is stored before the rows": (Half.FILL, BlockDesign(ready_after_rows=False), EVERYWHERE),
    "READY is stored without release": (Half.FILL, BlockDesign(state_store=Order.RELAXED), WEAK),
    "rows_ready is stored before the rows": (
        Half.FILL,
        BlockDesign(rows_before_their_count=False),
        EVERYWHERE,
    ),
    "change_seq is not bumped": (Half.FILL, BlockDesign(change_seq_bumped=False), EVERYWHERE),
    "change_seq is bumped before the state": (
        Half.FILL,
        BlockDesign(change_seq_before_state=True),
        EVERYWHERE,
    ),
    "nobody is woken": (Half.FILL, BlockDesign(waiters_woken=False), EVERYWHERE),
    "the waiter reads change_seq after the state": (
        Half.FILL,
        BlockDesign(seq_read_first=False, header_looked_at_twice=False),
        EVERYWHERE,
    ),
    "the state is stored before the body": (Half.REUSE, BlockDesign(body_before_state=False), EVERYWHERE),
    "a block is refilled while it is READY": (
        Half.REUSE,
        BlockDesign(retired_before_reuse=False, free_before_body=False),
        EVERYWHERE,
    ),
    "pages are used again before RETIRED is stored": (
        Half.REUSE,
        BlockDesign(retired_before_reuse=False),
        EVERYWHERE,
    ),
    "the header is looked at once": (Half.REUSE, BlockDesign(header_looked_at_twice=False), EVERYWHERE),
    "rows are not checked after the copy": (
        Half.REUSE,
        BlockDesign(rows_checked_after_copy=False),
        EVERYWHERE,
    ),
    "the check does not read the generation": (
        Half.REUSE,
        BlockDesign(check_reads_generation=False),
        EVERYWHERE,
    ),
    "the check does not read the state": (Half.REUSE, BlockDesign(check_reads_state=False), EVERYWHERE),
    "no fence between the copy and the check": (
        Half.REUSE,
        BlockDesign(check_fence=False),
        frozenset({VIEWS}),
    ),
}
BROKEN_RECOVERIES = {
    "control leaves FILLING as it is": BlockDesign(control_fails_filling=False),
    "control wakes only those who wait on a FILLING block": BlockDesign(control_wakes_every_block=False),
}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize("early", [False, True], ids=["whole-block", "first-rows"])
@pytest.mark.parametrize("crash_count", [0, 1], ids=["nobody-dies", "the-writer-may-die"])
def test_a_reader_of_a_block_that_fills_gets_right_rows_or_the_news_that_they_never_come(
    early: bool, crash_count: int, memory: Memory
) -> None:
    model = block_model(BlockDesign(), Half.FILL, early=early, crash_count=crash_count)
    exploration = explore(model, memory)
    assert exploration.violation is None, str(exploration.violation)
    expected = {"right rows", "worker lost"} if crash_count else {"right rows"}
    assert _outcomes(exploration) == expected


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_a_reader_past_its_lease_gets_right_rows_or_stale_handle(memory: Memory) -> None:
    exploration = explore(block_model(BlockDesign(), Half.REUSE), memory)
    assert exploration.violation is None, str(exploration.violation)
    assert _outcomes(exploration) == {"right rows", "stale handle"}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize("name", BROKEN_BLOCKS)
def test_a_broken_block_is_caught_where_the_memory_model_shows_it(name: str, memory: Memory) -> None:
    half, design, caught_by = BROKEN_BLOCKS[name]
    readers = [False, True] if half is Half.FILL else [False]  # one that wants all rows, one in a hurry
    violations = [explore(block_model(design, half, early=early), memory).violation for early in readers]
    assert any(violations) == (memory in caught_by), str(violations)


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize("name", BROKEN_RECOVERIES)
def test_an_incomplete_recovery_leaves_a_reader_asleep(name: str, memory: Memory) -> None:
    exploration = explore(block_model(BROKEN_RECOVERIES[name], Half.FILL, crash_count=1), memory)
    assert exploration.violation is not None
    assert "(machine) kill -9 writer" in exploration.violation.trace
    assert exploration.violation.broken.startswith("the reader waits for ever")


def _outcomes(exploration: Exploration) -> set[str]:
    """How the reader ends, over all states."""
    return {processes[1][2].outcome for processes, *_ in exploration.came_from} - {""}
