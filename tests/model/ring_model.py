"""Model of the SPSC ring of shm/csrc/ring.c: two slots of two words, private copies of the other's cursor.

The producer tries messages 1, 2, 3, ... and skips one that does not fit (try_publish is False). The
consumer polls; when it has proof that the producer has ended it drains once more.
Explored by test_ring_model.py.
"""

from dataclasses import dataclass

from tests.model.explorer import Model, Snapshot
from tests.model.program import AwaitExit, Check, Choose, Instruction, Jump, Let, Load, Order, Program, Store

SLOT_COUNT = 2
TAIL, HEAD = "tail", "head"


@dataclass(frozen=True)
class RingDesign:
    """The ring as it is built; the tests break one thing at a time."""

    tail_store: Order = Order.RELEASE
    tail_load: Order = Order.ACQUIRE
    slot_before_tail: bool = True
    copy_before_head: bool = True
    full_is_checked: bool = True
    free_slots_are_off_by_one: bool = False
    head_is_advanced: bool = True


def slot(cursor: int, word: int) -> str:
    """The location of one of the two words of the slot at cursor."""
    return f"slot{cursor & (SLOT_COUNT - 1)}.{word}"


def producer(design: RingDesign, message_count: int) -> Program:
    """try_publish, message_count times."""
    capacity = SLOT_COUNT + design.free_slots_are_off_by_one
    fill: list[Instruction | str] = [
        Store(lambda r: slot(r.tail, 0), lambda r: r.message),
        Store(lambda r: slot(r.tail, 1), lambda r: r.message),
    ]
    release: list[Instruction | str] = [
        Store(TAIL, lambda r: r.tail + 1, design.tail_store),
        Let(lambda r: {"accepted": (*r.accepted, r.message)}),
    ]
    check_full: list[Instruction | str] = [
        Jump("fill", lambda r: r.tail - r.seen_head < capacity),
        Load("seen_head", HEAD, Order.ACQUIRE),
        Check(lambda r: 0 <= r.tail - r.seen_head <= capacity, "an impossible head"),
        Jump("next", lambda r: r.tail - r.seen_head >= capacity),
    ]
    return Program(
        "producer",
        {"message": 0, "tail": 0, "seen_head": 0, "accepted": ()},
        [
            "next",
            Jump("end", lambda r: r.message == message_count),
            Let(lambda r: {"message": r.message + 1}),
            *(check_full if design.full_is_checked else []),
            "fill",
            *(fill + release if design.slot_before_tail else release + fill),
            Let(lambda r: {"tail": r.tail + 1}),
            Jump("next"),
            "end",
        ],
        crashes=True,
    )


def consumer(design: RingDesign) -> Program:
    """try_take until the producer has ended and the ring is empty."""
    copy: list[Instruction | str] = [
        Load("first", lambda r: slot(r.head, 0)),
        Load("second", lambda r: slot(r.head, 1)),
    ]
    release: list[Instruction | str] = (
        [Store(HEAD, lambda r: r.head + 1, Order.RELEASE)] if design.head_is_advanced else []
    )
    return Program(
        "consumer",
        {"head": 0, "seen_tail": 0, "first": 0, "second": 0, "received": (), "last_drain": False},
        [
            "take",
            Jump("copy", lambda r: r.seen_tail != r.head),
            Load("seen_tail", TAIL, design.tail_load),
            Check(lambda r: 0 <= r.seen_tail - r.head <= SLOT_COUNT, "an impossible tail"),
            Jump("empty", lambda r: r.seen_tail == r.head),
            "copy",
            *(copy + release if design.copy_before_head else release + copy),
            Check(lambda r: r.first == r.second, "a torn message"),
            Let(lambda r: {"head": r.head + 1, "received": (*r.received, r.first)}),
            Jump("take"),
            "empty",
            Jump("end", lambda r: r.last_drain),
            Choose("take"),
            AwaitExit("producer"),
            Let(lambda r: {"last_drain": True}),
            Jump("take"),
            "end",
        ],
        crashes=True,
    )


def ring_model(design: RingDesign, message_count: int, crash_count: int) -> Model:
    """Producer and consumer on one ring, and what they promise."""
    words = {slot(index, word): 0 for index in range(SLOT_COUNT) for word in range(2)}
    return Model(
        programs=(producer(design, message_count), consumer(design)),
        locations={TAIL: 0, HEAD: 0, **words},
        crash_count=crash_count,
        invariant=_in_order_and_published,
        at_rest=_nobody_is_stuck_and_nothing_lost,
    )


def _in_order_and_published(snapshot: Snapshot) -> str | None:
    """Received is always a prefix of what was published: nothing invented, doubled, skipped, swapped."""
    accepted, received = snapshot.registers("producer").accepted, snapshot.registers("consumer").received
    if received != accepted[: len(received)]:
        return f"published {accepted}, received {received}"
    return None


def _nobody_is_stuck_and_nothing_lost(snapshot: Snapshot) -> str | None:
    for name in ("producer", "consumer"):
        if snapshot.fate(name) not in ("done", "dead"):
            return f"the {name} is stuck"
    taken = snapshot.registers("consumer").head
    if snapshot.fate("consumer") == "done" and taken != snapshot.word(TAIL):
        return f"{snapshot.word(TAIL)} messages published, {taken} taken"
    accepted, received = snapshot.registers("producer").accepted, snapshot.registers("consumer").received
    if snapshot.fate("producer") == snapshot.fate("consumer") == "done" and received != accepted:
        return f"published {accepted}, received {received}"
    return None
