"""Model of a block's header and payload as shm/csrc/block.c and shm/segment.py keep them.

Two halves of a block's life. FILL: it is FILLING with generation 1; the writer fills two rows and makes it
READY. REUSE: it is READY; the writer reclaims it (RETIRED, FREE) and then either refills it with generation
2 or gives its pages to another block, whose rows land there under another header. The reader holds a handle
for generation 1 and never learns that its lease has ended. In FILL control takes the segment over after
proof of the writer's death; in REUSE a death only stops the writer, and wherever it stops is explored anyway.
The value of every row and of the body is the generation (or owner) that wrote it.
Explored by test_block_model.py.
"""

from dataclasses import dataclass
from enum import Enum, auto

from tests.model.explorer import Model, Snapshot
from tests.model.program import (
    AwaitExit,
    Check,
    Choose,
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

STATE, CHANGE_SEQ, GENERATION, BODY, ROWS_READY = "state", "change_seq", "generation", "body", "rows_ready"
ROWS = ("row0", "row1")
FREE, FILLING, READY, FAILED, RETIRED = range(5)
ANOTHER_BLOCK = 9

Steps = list[Instruction | str]


class Half(Enum):
    """Which half of the block's life is explored: both at once are too many states."""

    FILL = auto()
    REUSE = auto()


@dataclass(frozen=True)
class BlockDesign:
    """The block as it is built; the tests break one thing at a time."""

    body_before_state: bool = True
    free_before_body: bool = True
    refill_fence: bool = True
    ready_after_rows: bool = True
    state_store: Order = Order.RELEASE
    rows_before_their_count: bool = True
    retired_before_reuse: bool = True
    change_seq_bumped: bool = True
    change_seq_before_state: bool = False
    waiters_woken: bool = True
    header_looked_at_twice: bool = True
    seq_read_first: bool = True
    check_fence: bool = True
    check_reads_generation: bool = True
    check_reads_state: bool = True
    rows_checked_after_copy: bool = True
    control_fails_filling: bool = True
    control_wakes_every_block: bool = True


def _bump(design: BlockDesign) -> Steps:
    if not design.change_seq_bumped:
        return []
    return [Store(CHANGE_SEQ, lambda r: r.seq + 1, Order.RELEASE), Let(lambda r: {"seq": r.seq + 1})]


def _store_state(design: BlockDesign, state: int) -> Steps:
    """block_store_state: the state by release, the bump, the wake."""
    bump, store = _bump(design), Store(STATE, state, design.state_store)
    wake: Steps = [FutexWake(CHANGE_SEQ)] if design.waiters_woken else []
    return [*bump, *wake, store] if design.change_seq_before_state else [store, *bump, *wake]


def _store_header(design: BlockDesign, generation: int) -> Steps:
    """block_store: FREE and a new number first, then the body, then the state."""
    fill: Steps = [Store(BODY, generation), Store(ROWS_READY, 0), Store(GENERATION, generation)]
    publish = _store_state(design, FILLING)
    return [
        *([Store(STATE, FREE), *_bump(design)] if design.free_before_body else []),
        *([Fence(Order.RELEASE)] if design.refill_fence else []),
        *(fill + publish if design.body_before_state else publish + fill),
    ]


def _fill_rows(design: BlockDesign, generation: int, *, count_first_row: bool) -> Steps:
    count: Steps = [Store(ROWS_READY, 1, Order.RELEASE), *_bump(design), FutexWake(CHANGE_SEQ)]
    if not count_first_row:
        count = []
    first: Steps = [Store(ROWS[0], generation)]
    ready = _store_state(design, READY)
    second: Steps = [Store(ROWS[1], generation)]
    return [
        *(first + count if design.rows_before_their_count else count + first),
        *(second + ready if design.ready_after_rows else ready + second),
    ]


def writer(design: BlockDesign, half: Half) -> Program:
    """The segment's worker."""
    retire: Steps = [*_store_state(design, RETIRED), *_store_state(design, FREE)]
    reuse: Steps = [
        *(retire if design.retired_before_reuse else []),
        Choose("elsewhere"),
        *_store_header(design, 2),
        *_fill_rows(design, 2, count_first_row=False),
        Jump("end"),
        "elsewhere",
        Store(ROWS[0], ANOTHER_BLOCK),
        Store(ROWS[1], ANOTHER_BLOCK),
        "end",
    ]
    fill = _fill_rows(design, 1, count_first_row=True)
    return Program("writer", {"seq": 0}, fill if half is Half.FILL else reuse, crashes=True)


def _load_header(design: BlockDesign) -> Steps:
    """block_load: a copy counts only if state, generation and change_seq held still."""
    seq: Steps = [Load("seq", CHANGE_SEQ, Order.ACQUIRE)]
    copy: Steps = [
        Load("state", STATE, Order.ACQUIRE),
        Load("generation", GENERATION, Order.ACQUIRE),
        Load("body", BODY),
        Load("rows_ready", ROWS_READY, Order.ACQUIRE),
    ]
    again: Steps = [
        Fence(Order.ACQUIRE),
        Load("again", STATE),
        Jump("load", lambda r: r.again != r.state),
        Load("again", GENERATION),
        Jump("load", lambda r: r.again != r.generation),
        Load("again", CHANGE_SEQ),
        Jump("load", lambda r: r.again != r.seq),
    ]
    return [
        "load",
        *(seq + copy if design.seq_read_first else copy + seq),
        *(again if design.header_looked_at_twice else []),
        Check(
            lambda r: r.state in (FREE, RETIRED) or r.body == r.generation, "a header of two fills, accepted"
        ),
        Jump("stale", lambda r: r.generation != 1 or r.state in (FREE, RETIRED)),
    ]


def _check_handle(design: BlockDesign) -> Steps:
    """View.check after the rows were copied: fence, then the header once more."""
    steps: Steps = [Fence(Order.ACQUIRE)] if design.check_fence else []
    if design.check_reads_state:
        steps += [
            Load("again", STATE, Order.ACQUIRE),
            Jump("stale", lambda r: r.again in (FREE, RETIRED)),
        ]
    if design.check_reads_generation:
        steps += [Load("again", GENERATION, Order.ACQUIRE), Jump("stale", lambda r: r.again != 1)]
    return steps if design.rows_checked_after_copy else []


_READER_REGISTERS = {
    "seq": 0, "state": 0, "generation": 0, "body": 0, "rows_ready": 0, "again": 0, "row0": 0, "row1": 0,
    "outcome": "",
}  # fmt: skip


def reader(design: BlockDesign, *, early: bool) -> Program:
    """A reader with a handle for generation 1; early: it takes the first row while the block is FILLING.

    Ends with right rows, the news that the worker is lost, or StaleHandle. Sleeps while there is nothing.
    It stores nothing, so nobody can depend on it and its death needs no exploring.
    """
    wait: Steps = [
        Jump("rows", lambda r: r.state == READY),
        Jump("lost", lambda r: r.state == FAILED),
        *([Jump("first row", lambda r: r.rows_ready == 1)] if early else []),
        FutexWait(CHANGE_SEQ, lambda r: r.seq),
        Jump("load"),
    ]
    return Program(
        "reader",
        _READER_REGISTERS,
        [
            *_load_header(design),
            *wait,
            "first row",
            Load("row0", ROWS[0]),
            *_check_handle(design),
            Check(lambda r: r.row0 == 1, "a wrong first row, accepted"),
            Jump("right"),
            "rows",
            Load("row0", ROWS[0]),
            Load("row1", ROWS[1]),
            *_check_handle(design),
            Check(lambda r: (r.row0, r.row1) == (1, 1), "wrong rows, accepted"),
            "right",
            Let(lambda r: {"outcome": "right rows"}),
            Jump("end"),
            "lost",
            Let(lambda r: {"outcome": "worker lost"}),
            Jump("end"),
            "stale",
            Let(lambda r: {"outcome": "stale handle"}),
            "end",
        ],
    )


def control(design: BlockDesign) -> Program:
    """SegmentRecovery: FILLING becomes FAILED, and whoever waits on any block is woken.

    Any block: a writer killed between its store of READY and the wake leaves a sleeper behind, too.
    """
    return Program(
        "control",
        {"state": 0, "seq": 0},
        [
            AwaitExit("writer", only_death=True),
            Load("state", STATE, Order.ACQUIRE),
            Load("seq", CHANGE_SEQ),
            Jump("other", lambda r: r.state != FILLING),
            *([] if design.control_fails_filling else [Jump("end")]),
            Store(STATE, FAILED, Order.RELEASE),
            Jump("announce"),
            "other",
            *([] if design.control_wakes_every_block else [Jump("end")]),
            "announce",
            Store(CHANGE_SEQ, lambda r: r.seq + 1, Order.RELEASE),
            FutexWake(CHANGE_SEQ),
            "end",
        ],
    )


def block_model(design: BlockDesign, half: Half, *, early: bool = False, crash_count: int = 0) -> Model:
    """One writer, one reader; in FILL, control."""
    rows = 0 if half is Half.FILL else 1
    state = FILLING if half is Half.FILL else READY
    words = {STATE: state, CHANGE_SEQ: 0, GENERATION: 1, BODY: 1, ROWS_READY: 0, ROWS[0]: rows, ROWS[1]: rows}
    programs = (writer(design, half), reader(design, early=early))
    return Model(
        programs=(*programs, control(design)) if half is Half.FILL else programs,
        locations=words,
        crash_count=crash_count,
        at_rest=_nobody_waits_for_ever,
    )


def _nobody_waits_for_ever(snapshot: Snapshot) -> str | None:
    if snapshot.fate("writer") not in ("done", "dead"):
        return "the writer is stuck"
    if snapshot.fate("reader") not in ("done", "dead"):
        return f"the reader waits for ever on a block in state {snapshot.word(STATE)}"
    return None
