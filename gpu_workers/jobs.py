"""A Job is one ticket under way in this worker; an Item is one piece of media of it.

Jobs are made by intake.py, kept by backlog.py (the only one that changes their state, under its lock) and
read by everyone who holds one of their items.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared
from shm.messages import BlockMetadata, ItemRows
from shm.segment import FillingBlock

_U32_MAX: Final = 0xFFFFFFFF
_CLAMP_NS: Final = _U32_MAX * 1000


class InputRange(NamedTuple):
    """Where a request lies in the arena: nbytes at offset, RequestMetadata in the first metadata_bytes."""

    offset: int = 0
    nbytes: int = 0
    metadata_bytes: int = 0


class ItemState(Enum):
    """Where an item is. The two HELD states mean that one thread works on it outside the backlog's lock."""

    UNMEASURED = auto()  # waiting for a preprocess thread to find its size
    WAITING = auto()  # for a preprocess thread
    HELD_FOR_PREPARE = auto()  # or for measuring
    PREPARED = auto()  # waiting for the device
    HELD_FOR_ENCODE = auto()  # in a batch, until its rows are in the block
    DONE = auto()


@dataclass(eq=False, slots=True)
class Item:
    """One picture (video, sound) of a job."""

    job: "Job"
    index: int
    media: MediaItem
    known_plan: ItemPlan | None  # None while UNMEASURED
    row_start: int = 0  # valid once the job's rows are laid out
    state: ItemState = ItemState.WAITING
    prepared: Prepared | None = None
    prepared_ns: int = 0  # CLOCK_MONOTONIC, when it began to wait for the device
    order: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Who goes first: the oldest deadline, then the older ticket, then the order in the request."""
        self.order = (self.job.deadline_ns, self.job.ticket, self.index)

    @property
    def plan(self) -> ItemPlan:
        """What the item will become; only for items that are measured."""
        assert self.known_plan is not None, "the item is measured first"
        return self.known_plan

    @property
    def deadline_ns(self) -> int:
        """CLOCK_MONOTONIC; the job's."""
        return self.job.deadline_ns

    @property
    def cost_patches(self) -> int:
        """What the item costs the device; nothing while it is only to be measured."""
        return 0 if self.known_plan is None else self.known_plan.cost_patches

    @property
    def job_key(self) -> int:
        """Items of the same job have the same."""
        return self.job.ticket

    @property
    def job_share(self) -> int:
        """How many items of its job may go into one batch now."""
        return max(1, self.job.taken_items) if self.job.is_streamed else len(self.job.items)

    @property
    def batch_key(self) -> str:
        """Only items of the same key may share a forward."""
        return (self.prepared and self.prepared.batch_key) or self.job.modality


@dataclass(slots=True)
class Timings:
    """Where a job's time went, in nanoseconds; a step shared with a batch counts whole."""

    taken_ns: int = field(default_factory=time.monotonic_ns)
    queue_ns: int = 0  # from the take to the first preprocess
    preprocess_ns: int = 0
    forward_ns: int = 0
    copy_ns: int = 0
    batch_items: int = 0  # of the largest batch that the job was part of

    def microseconds(self) -> list[int]:
        """Queue, preprocess, forward and copy as completion records carry them: whole, clamped to u32."""
        times_ns = (self.queue_ns, self.preprocess_ns, self.forward_ns, self.copy_ns)
        return [time_ns // 1000 if time_ns < _CLAMP_NS else _U32_MAX for time_ns in times_ns]


@dataclass(eq=False, slots=True)
class Job:
    """One ticket. It ends exactly once, READY or FAILED, when no thread holds an item of it any more."""

    ticket: int
    deadline_ns: int
    modality: str = ""
    input: InputRange = field(default_factory=InputRange)
    items: list[Item] = field(default_factory=list)
    block: FillingBlock | None = None
    error: ItemError | None = None  # set once; the job is failed from then on
    error_item: int = 0
    is_streamed: bool = False  # a reader waits for the first rows already
    taken_items: int = 0  # by the device, so far
    held_items: int = 0
    ready_items: int = 0  # length of the prefix of items whose rows are all in the block
    timings: Timings = field(default_factory=Timings)
    unmeasured_items: int = 0
    asked_faults: tuple[str, ...] = ()  # tests only: the fault points that its measured items ask for

    def add_item(self, media: MediaItem, plan: ItemPlan | None) -> None:
        """Append an item, and its plan if its header told it."""
        item = Item(self, len(self.items), media, None, state=ItemState.UNMEASURED)
        self.items.append(item)
        self.unmeasured_items += 1
        if plan is not None:
            self.set_plan(item, plan)

    def set_plan(self, item: Item, plan: ItemPlan) -> None:
        """The item's size is known."""
        item.known_plan = plan
        item.state = ItemState.WAITING
        self.unmeasured_items -= 1
        if plan.fault:
            self.asked_faults += (plan.fault,)

    @property
    def is_measured(self) -> bool:
        """Whether every item's size is known."""
        return self.unmeasured_items == 0

    def lay_out_rows(self) -> None:
        """Give every item its place: its rows follow those of the item before it."""
        row_start = 0
        for item in self.items:
            item.row_start = row_start
            row_start += item.plan.rows

    @property
    def rows(self) -> int:
        """Rows of all items together, once they are laid out."""
        if not self.items:
            return 0
        last = self.items[-1]
        return last.row_start + last.plan.rows

    def block_metadata(self) -> BlockMetadata:
        """Whose rows are where, for the head of the block."""
        return BlockMetadata(self.modality, [_item_rows(item) for item in self.items])


def _item_rows(item: Item) -> ItemRows:
    plan = item.plan
    return ItemRows(item.row_start, plan.rows, plan.grids, plan.width, plan.height, plan.aux)
