"""What goes into the next forward. Pure: no threads, no torch, no clock.

The policy: the item whose deadline is oldest always goes, whatever its size, so nothing starves. The others
follow in the same order as far as both limits allow; one that does not fit is passed over for smaller ones
behind it, and is first itself once those before it are gone. An item larger than max_patches goes alone.

Where a reader waits for the first rows of a job, its items do not all go together: one goes first, then one,
two, four ..., so many as went before. The first rows are there after one item's time, and a job of n items
takes 1 + log2(n) forwards in place of one. What its share leaves free in a batch is for the items of others,
so throughput falls only while such a job is alone. Jobs whose readers wait for READY keep to no share.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, Protocol, TypeVar

_ORDER: Final = attrgetter("order")


class Batchable(Protocol):
    """What the choice depends on; jobs.Item is one."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: who goes first."""

    @property
    def cost_patches(self) -> int:
        """Share of max_patches."""

    @property
    def batch_key(self) -> str:
        """Items of different keys cannot share a forward."""

    @property
    def job_key(self) -> int:
        """Items of one job have the same."""

    @property
    def job_share(self) -> int:
        """How many items of its job may go into one batch, at least 1."""


Candidate = TypeVar("Candidate", bound=Batchable)


def next_batch(waiting: Iterable[Candidate], max_items: int, max_patches: int) -> list[Candidate]:
    """The items of the next forward, oldest first; empty only if nothing waits."""
    batch: list[Candidate] = []
    patches = 0
    batch_key = ""
    taken: dict[int, int] = {}  # items of each job in the batch
    for candidate in sorted(waiting, key=_ORDER):
        if not batch:
            batch_key = candidate.batch_key
        elif candidate.batch_key != batch_key or patches + candidate.cost_patches > max_patches:
            continue
        of_its_job = taken.get(candidate.job_key, 0)
        if of_its_job and of_its_job >= candidate.job_share:
            continue
        batch.append(candidate)
        taken[candidate.job_key] = of_its_job + 1
        patches += candidate.cost_patches
        if len(batch) == max_items:
            break
    return batch
