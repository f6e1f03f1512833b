"""The doorbells' protocol: no wake-up is lost, in any interleaving, memory model or death."""

import pytest

from tests.model.doorbell_model import DoorbellDesign, Flavour, doorbell_model
from tests.model.explorer import explore
from tests.model.memory import ALL_MEMORIES, UNORDERED, VIEWS, X86, Memory

EVERYWHERE = frozenset({X86, UNORDERED, VIEWS})
EVENTFDS = (Flavour.EVENTFD, Flavour.EVENTFD_READ_ONLY)

# What breaks it, in which flavours, and the memory models that must notice. An exchange is a full barrier
# on x86 and writes memory at once in both buffer models, so a fence missing beside one shows in views only.
BROKEN_DOORBELLS = {
    "no fence between the publish and the look at armed": (
        DoorbellDesign(producer_fence=False),
        tuple(Flavour),
        EVERYWHERE,
    ),
    "no fence between arming and the second look": (
        DoorbellDesign(consumer_fence=False),
        tuple(Flavour),
        frozenset({VIEWS}),
    ),
    "armed by a plain store and no fence": (
        DoorbellDesign(armed_by_exchange=False, consumer_fence=False),
        tuple(Flavour),
        EVERYWHERE,
    ),
    "no second look after arming": (DoorbellDesign(consumer_looks_again=False), tuple(Flavour), EVERYWHERE),
    "the bell is rung before the publish": (
        DoorbellDesign(publishes_before_the_bell=False),
        tuple(Flavour),
        EVERYWHERE,
    ),
    "the producer loads armed where it should exchange": (
        DoorbellDesign(producer_exchanges=False),
        (Flavour.FUTEX,),
        EVERYWHERE,
    ),
    "the sleep does not compare armed": (
        DoorbellDesign(sleep_compares_armed=False),
        (Flavour.FUTEX,),
        EVERYWHERE,
    ),
    "the eventfd is cleared after arming": (
        DoorbellDesign(bell_cleared_before_arming=False),
        EVENTFDS,
        EVERYWHERE,
    ),
}
BROKEN_DEATHS = {
    "nobody rings after a death": (DoorbellDesign(rings_after_a_death=False), tuple(Flavour)),
    "a death rings only an armed consumer": (
        DoorbellDesign(death_wakes_only_if_armed=True),
        (Flavour.FUTEX,),
    ),
}


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize("flavour", Flavour, ids=lambda flavour: flavour.name.lower())
@pytest.mark.parametrize("crash_count", [0, 2], ids=["nobody-dies", "anybody-dies"])
def test_a_doorbell_never_loses_a_wake_up(flavour: Flavour, memory: Memory, crash_count: int) -> None:
    model = doorbell_model(DoorbellDesign(), flavour, message_count=3, crash_count=crash_count)
    exploration = explore(model, memory)
    assert exploration.violation is None, str(exploration.violation)
    assert exploration.rest_count > 0


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize(
    ("name", "flavour"),
    [(name, flavour) for name, (_, flavours, _) in BROKEN_DOORBELLS.items() for flavour in flavours],
)
def test_a_broken_doorbell_is_caught_where_the_memory_model_shows_it(
    name: str, flavour: Flavour, memory: Memory
) -> None:
    design, _, caught_by = BROKEN_DOORBELLS[name]
    exploration = explore(doorbell_model(design, flavour, message_count=2, crash_count=0), memory)
    assert (exploration.violation is not None) == (memory in caught_by), str(exploration.violation)


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=repr)
@pytest.mark.parametrize(
    ("name", "flavour"),
    [(name, flavour) for name, (_, flavours) in BROKEN_DEATHS.items() for flavour in flavours],
)
def test_a_death_that_rings_no_bell_strands_a_published_message(
    name: str, flavour: Flavour, memory: Memory
) -> None:
    design, _ = BROKEN_DEATHS[name]
    exploration = explore(doorbell_model(design, flavour, message_count=2, crash_count=1), memory)
    assert exploration.violation is not None
    assert "(machine) kill -9 producer" in exploration.violation.trace
