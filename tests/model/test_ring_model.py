"""The ring's protocol, every interleaving, three memory models, kill -9 of either side at every step."""

import pytest

from tests.model.explorer import explore
from tests.model.memory import ALL_MEMORIES, UNORDERED, VIEWS, X86, Memory
from tests.model.program import Order
from tests.model.ring_model import RingDesign, ring_model

# What breaks it, and the memory models that must notice. Elsewhere the hardware forgives it.
BROKEN_RINGS: dict[str, tuple[RingDesign, set[Memory]]] = {
    "the tail is published before the slot is written": (
        RingDesign(slot_before_tail=False),
        {X86, UNORDERED, VIEWS},
    ),
    "the tail is stored without release": (RingDesign(tail_store=Order.RELAXED), {UNORDERED, VIEWS}),
    "the tail is loaded without acquire": (RingDesign(tail_load=Order.RELAXED), {VIEWS}),
    "the head is released before the copy": (RingDesign(copy_before_head=False), {X86, UNORDERED, VIEWS}),
    "the producer does not look whether the ring is full": (
        RingDesign(full_is_checked=False),
        {X86, UNORDERED, VIEWS},
    ),
    "the producer believes in one slot too many": (
        RingDesign(free_slots_are_off_by_one=True),
        {X86, UNORDERED, VIEWS},
    ),
}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_the_ring_delivers_every_message_once_whole_and_in_order(memory: Memory) -> None:
    exploration = explore(ring_model(RingDesign(), message_count=6, crash_count=0), memory)
    assert exploration.violation is None, str(exploration.violation)
    assert exploration.rest_count > 0


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
def test_a_ring_outlives_a_kill_of_either_side_at_any_step(memory: Memory) -> None:
    exploration = explore(ring_model(RingDesign(), message_count=5, crash_count=2), memory)
    assert exploration.violation is None, str(exploration.violation)
    assert exploration.rest_count > 0


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize("name", BROKEN_RINGS)
def test_a_broken_ring_is_caught_where_the_memory_model_shows_it(name: str, memory: Memory) -> None:
    design, caught_by = BROKEN_RINGS[name]
    exploration = explore(ring_model(design, message_count=4, crash_count=0), memory)
    assert (exploration.violation is not None) == (memory in caught_by), str(exploration.violation)


def test_the_trace_of_a_broken_ring_names_the_steps_that_break_it() -> None:
    design, _ = BROKEN_RINGS["the tail is published before the slot is written"]
    violation = explore(ring_model(design, message_count=1, crash_count=0), X86).violation
    assert violation is not None
    assert "producer: store tail = 1 (release)" in violation.trace
    assert "consumer: load slot0.0 -> 0 (relaxed)" in violation.trace
    assert violation.broken == "published (1,), received (0,)"
