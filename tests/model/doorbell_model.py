"""Model of the doorbells of shm/csrc/doorbell.c and ring.c (arm, claim, wait, ring after a death).

Only the cursor and the bell are modelled: what a slot holds is ring_model.py's business. Three flavours:
a futex on `armed`, an eventfd whose producer disarms by exchange, an eventfd whose producer maps `armed`
read-only (it only loads; the consumer disarms itself). Explored by test_doorbell_model.py.
"""

from dataclasses import dataclass
from enum import Enum, auto

from tests.model.explorer import Model, Snapshot
from tests.model.program import (
    AwaitExit,
    BellClear,
    BellRing,
    BellWait,
    Exchange,
    Fence,
    FutexWait,
    FutexWake,
    Instruction,
    Jump,
    Let,
    Load,
    Order,
    Program,
    Store,
)

TAIL, ARMED, EVENTFD = "tail", "armed", "eventfd"
BELL_DISARMED, BELL_ARMED, BELL_RUNG = 0, 1, 2

Steps = list[Instruction | str]


class Flavour(Enum):
    """How the consumer sleeps and who may write `armed`."""

    FUTEX = auto()
    EVENTFD = auto()
    EVENTFD_READ_ONLY = auto()


@dataclass(frozen=True)
class DoorbellDesign:
    """The doorbell as it is built; the tests break one thing at a time."""

    producer_fence: bool = True
    producer_exchanges: bool = True
    publishes_before_the_bell: bool = True
    armed_by_exchange: bool = True
    consumer_fence: bool = True
    consumer_looks_again: bool = True
    sleep_compares_armed: bool = True
    bell_cleared_before_arming: bool = True
    rings_after_a_death: bool = True
    death_wakes_only_if_armed: bool = False


def producer(design: DoorbellDesign, flavour: Flavour, message_count: int) -> Program:
    """Publish message_count times, ringing when the consumer is armed."""
    publish: Steps = [
        Store(TAIL, lambda r: r.published + 1, Order.RELEASE),
        Let(lambda r: {"published": r.published + 1}),
    ]
    claim: Steps = [
        *([Fence()] if design.producer_fence else []),
        Load("armed", ARMED),
        Jump("rung", lambda r: r.armed != BELL_ARMED),
    ]
    if design.producer_exchanges and flavour is not Flavour.EVENTFD_READ_ONLY:
        claim += [Exchange("armed", ARMED, BELL_DISARMED), Jump("rung", lambda r: r.armed != BELL_ARMED)]
    ring: Steps = [*claim, FutexWake(ARMED) if flavour is Flavour.FUTEX else BellRing(EVENTFD), "rung"]
    return Program(
        "producer",
        {"published": 0, "armed": 0},
        [
            "next",
            Jump("end", lambda r: r.published == message_count),
            *(publish + ring if design.publishes_before_the_bell else ring + publish),
            Jump("next"),
            "end",
        ],
        crashes=True,
    )


def _arm(design: DoorbellDesign) -> Steps:
    """Arm, fence, look again; to `awake` when something is there."""
    steps: Steps = [
        Exchange("before", ARMED, BELL_ARMED) if design.armed_by_exchange else Store(ARMED, BELL_ARMED),
        *([Fence()] if design.consumer_fence else []),
    ]
    if design.consumer_looks_again:
        steps += [Load("tail", TAIL, Order.ACQUIRE), Jump("awake", lambda r: r.tail != r.taken)]
    return steps


_TAKE_ALL: Steps = [
    Load("tail", TAIL, Order.ACQUIRE),
    Let(lambda r: {"taken": r.tail}),
]


def futex_consumer(design: DoorbellDesign) -> Program:
    """Consumer.take in a loop, as a worker's thread runs it."""
    return Program(
        "consumer",
        {"tail": 0, "taken": 0, "before": 0},
        [
            "take",
            *_TAKE_ALL,
            "arm",
            *_arm(design),
            Jump("rung", lambda r: r.before == BELL_RUNG),
            FutexWait(ARMED, BELL_ARMED if design.sleep_compares_armed else None),
            Exchange("before", ARMED, BELL_DISARMED),
            Load("tail", TAIL, Order.ACQUIRE),
            Jump("take", lambda r: r.tail != r.taken),
            Jump("rung", lambda r: r.before == BELL_RUNG),
            Jump("arm"),
            "awake",
            Exchange("before", ARMED, BELL_DISARMED),
            Jump("take", lambda r: r.before != BELL_RUNG),
            "rung",  # only the watcher rings without a message: the producer is dead, drain once more
            AwaitExit("producer", only_death=True),
            *_TAKE_ALL,
        ],
        crashes=True,
    )


def eventfd_consumer(design: DoorbellDesign, flavour: Flavour) -> Program:
    """The asyncio side: the loop calls back while the eventfd is readable."""
    clear: Steps = [BellClear(EVENTFD)]
    disarm: Steps = [Exchange("before", ARMED, BELL_DISARMED)] if flavour is Flavour.EVENTFD_READ_ONLY else []
    return Program(
        "consumer",
        {"tail": 0, "taken": 0, "before": 0},
        [
            Jump("take"),
            "readable",
            *(clear if design.bell_cleared_before_arming else []),
            *disarm,
            "take",
            *_TAKE_ALL,
            *_arm(design),
            *([] if design.bell_cleared_before_arming else clear),
            BellWait(EVENTFD),
            Jump("readable"),
            "awake",
            Exchange("before", ARMED, BELL_DISARMED),
            Jump("take"),
        ],
        crashes=True,
    )


def watcher(design: DoorbellDesign, flavour: Flavour) -> Program:
    """Proof of death is also a doorbell: ring whatever armed holds (doorbell_ring_empty)."""
    ring: Steps = [BellRing(EVENTFD)]
    if flavour is Flavour.FUTEX:
        ring = [
            Exchange("before", ARMED, BELL_RUNG),
            *([Jump("end", lambda r: r.before != BELL_ARMED)] if design.death_wakes_only_if_armed else []),
            FutexWake(ARMED),
        ]
    return Program(
        "watcher",
        {"before": 0},
        [AwaitExit("producer", only_death=True), *(ring if design.rings_after_a_death else []), "end"],
    )


def doorbell_model(design: DoorbellDesign, flavour: Flavour, message_count: int, crash_count: int) -> Model:
    """A producer, a consumer that sleeps, and the one who watches for the producer's death."""
    consumer = futex_consumer(design) if flavour is Flavour.FUTEX else eventfd_consumer(design, flavour)
    return Model(
        programs=(producer(design, flavour, message_count), consumer, watcher(design, flavour)),
        locations={TAIL: 0, ARMED: BELL_DISARMED},
        bells=(EVENTFD,),
        crash_count=crash_count,
        at_rest=_nobody_sleeps_through_a_message,
    )


def _nobody_sleeps_through_a_message(snapshot: Snapshot) -> str | None:
    """At rest nothing will ever happen again: what is published and not taken now is lost."""
    if snapshot.fate("producer") not in ("done", "dead"):
        return "the producer is stuck"
    if snapshot.fate("consumer") == "dead":
        return None
    published, taken = snapshot.word(TAIL), snapshot.registers("consumer").taken
    if taken != published:
        return f"lost wake-up: {published} published, the consumer sleeps with {taken} taken"
    return None
