"""A Job is one ticket under way in this worker; an Item is one piece of media of it.

Jobs are made by intake.py, kept by backlog.py (the only one that changes their state, under its lock) and
read by everyone who holds one of their items.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, Prepared
from shm.messages import BlockMetadata, ItemRows
from shm.segment import FillingBlock

_U32_MAX: Final = 0xFFFFFFFF


class ItemState(Enum):
    """Where an item is. The two HELD states mean that one thread works on it outside the backlog's lock."""

    WAITING = auto()  # for a preprocess thread
    HELD_FOR_PREPARE = auto()
    PREPARED = auto()  # waiting for the device
    HELD_FOR_ENCODE = auto()  # in a batch, until its rows are in the block
    DONE = auto()


@dataclass(eq=False, slots=True)
class Item:
    """One picture (video, sound) of a job."""

    job: "Job"
    index: int
    data: memoryview  # read-only, in the input arena: valid until the job has ended
    plan: ItemPlan
    row_start: int
    state: ItemState = ItemState.WAITING
    prepared: Prepared | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: the oldest deadline, then the older ticket, then the order in the request."""
        return (self.job.deadline_ns, self.job.ticket, self.index)

    @property
    def deadline_ns(self) -> int:
        """CLOCK_MONOTONIC; the job's."""
        return self.job.deadline_ns

    @property
    def cost_patches(self) -> int:
        """What the item costs the device."""
        return self.plan.cost_patches

    @property
    def batch_key(self) -> str:
        """Only items of the same key may share a forward."""
        return self.job.modality


@dataclass(slots=True)
class Timings:
    """Where a job's time went, in nanoseconds; a step shared with a batch counts whole."""

    taken_ns: int = field(default_factory=time.monotonic_ns)
    queue_ns: int = 0  # from the take to the first preprocess
    preprocess_ns: int = 0
    forward_ns: int = 0
    copy_ns: int = 0
    batch_items: int = 0  # of the largest batch that the job was part of

    @staticmethod
    def microseconds(nanoseconds: int) -> int:
        """As completion records carry it: whole microseconds, clamped to u32."""
        return min(nanoseconds // 1000, _U32_MAX)


@dataclass(eq=False, slots=True)
class Job:
    """One ticket. It ends exactly once, READY or FAILED, when no thread holds an item of it any more."""

    ticket: int
    deadline_ns: int
    modality: str = ""
    items: list[Item] = field(default_factory=list)
    block: FillingBlock | None = None
    error: ItemError | None = None  # set once; the job is failed from then on
    error_item: int = 0
    held_items: int = 0
    ready_items: int = 0  # length of the prefix of items whose rows are all in the block
    timings: Timings = field(default_factory=Timings)

    def add_item(self, data: memoryview, plan: ItemPlan) -> None:
        """Append an item; its rows follow those of the item before it."""
        self.items.append(Item(self, len(self.items), data, plan, self.rows))

    @property
    def rows(self) -> int:
        """Rows of all items together."""
        if not self.items:
            return 0
        last = self.items[-1]
        return last.row_start + last.plan.rows

    @property
    def asked_faults(self) -> tuple[str, ...]:
        """Tests only: the fault points that its items ask for."""
        return tuple(item.plan.fault for item in self.items if item.plan.fault)

    def block_metadata(self) -> BlockMetadata:
        """Whose rows are where, for the head of the block."""
        return BlockMetadata(
            self.modality,
            [
                ItemRows(item.row_start, item.plan.rows, item.plan.grids, item.plan.width, item.plan.height)
                for item in self.items
            ],
        )
