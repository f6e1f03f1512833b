"""The memory models themselves, by the litmus tests that tell them apart."""

import pytest

from tests.model.explorer import DEAD, DONE, Model, explore
from tests.model.memory import ALL_MEMORIES, UNORDERED, VIEWS, X86, Memory
from tests.model.program import AwaitExit, Fence, Instruction, Load, Order, Program, Store

Outcomes = set[tuple[int, ...]]


def _outcomes(memory: Memory, locations: tuple[str, ...], *threads: list[Instruction | str]) -> Outcomes:
    """Every pair (triple, ...) of last loads, one per thread that loads, with all threads finished."""
    programs = tuple(Program(f"t{index}", {"seen": 0}, steps) for index, steps in enumerate(threads))
    exploration = explore(Model(programs, dict.fromkeys(locations, 0)), memory)
    return {
        tuple(registers.seen for _, _, registers in processes)
        for processes, *_ in exploration.came_from
        if all(status == DONE for _, status, _ in processes)
    }


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_two_processes_that_store_then_load_may_both_miss_the_other(memory: Memory) -> None:
    outcomes = _outcomes(
        memory,
        ("x", "y"),
        [Store("x", 1, Order.RELEASE), Load("seen", "y", Order.ACQUIRE)],
        [Store("y", 1, Order.RELEASE), Load("seen", "x", Order.ACQUIRE)],
    )
    assert outcomes == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_a_fence_in_both_makes_one_see_the_other(memory: Memory) -> None:
    outcomes = _outcomes(
        memory,
        ("x", "y"),
        [Store("x", 1), Fence(), Load("seen", "y")],
        [Store("y", 1), Fence(), Load("seen", "x")],
    )
    assert outcomes == {(0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_a_fence_in_one_of_the_two_is_not_enough(memory: Memory) -> None:
    outcomes = _outcomes(
        memory,
        ("x", "y"),
        [Store("x", 1), Fence(), Load("seen", "y")],
        [Store("y", 1), Load("seen", "x")],
    )
    assert (0, 0) in outcomes


def _message_passing(memory: Memory, release: Order, acquire: Order) -> bool:
    """Whether a reader that saw the flag may still miss the data."""
    writer: list[Instruction | str] = [Store("data", 1), Store("flag", 1, release)]
    reader = Program("reader", {"flag": 0, "data": 0}, [Load("flag", "flag", acquire), Load("data", "data")])
    model = Model((Program("writer", {"unused": 0}, writer), reader), {"data": 0, "flag": 0})
    exploration = explore(model, memory)
    return any(
        (processes[1][2].flag, processes[1][2].data, processes[1][1]) == (1, 0, DONE)
        for processes, *_ in exploration.came_from
    )


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_release_and_acquire_carry_the_data_with_the_flag(memory: Memory) -> None:
    assert not _message_passing(memory, Order.RELEASE, Order.ACQUIRE)


@pytest.mark.parametrize(("memory", "missed"), [(X86, False), (UNORDERED, True), (VIEWS, True)])
def test_without_release_the_data_may_come_after_the_flag(memory: Memory, missed: bool) -> None:
    assert _message_passing(memory, Order.RELAXED, Order.ACQUIRE) is missed


@pytest.mark.parametrize(("memory", "missed"), [(X86, False), (UNORDERED, False), (VIEWS, True)])
def test_without_acquire_the_data_may_be_read_before_the_flag(memory: Memory, missed: bool) -> None:
    assert _message_passing(memory, Order.RELEASE, Order.RELAXED) is missed


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_a_kill_keeps_what_has_landed_and_may_lose_the_rest(memory: Memory) -> None:
    writer = Program("writer", {"unused": 0}, [Store("x", 1), Store("x", 2)], crashes=True)
    heir = Program("heir", {"seen": 0}, [AwaitExit("writer"), Load("seen", "x")])
    exploration = explore(Model((writer, heir), {"x": 0}, crash_count=1), memory)
    seen = {
        processes[1][2].seen
        for processes, *_ in exploration.came_from
        if (processes[0][1], processes[1][1]) == (DEAD, DONE)
    }
    assert seen >= {0, 1}
