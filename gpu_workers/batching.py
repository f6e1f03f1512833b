"""What goes into the next forward. Pure: no threads, no torch, no clock.

The policy: the item whose deadline is oldest always goes, whatever its size, so nothing starves. The others
follow in the same order as far as both limits allow; one that does not fit is passed over for smaller ones
behind it, and is first itself once those before it are gone. An item larger than max_patches goes alone.

Where a reader waits for the first rows of a job, its items do not all go together: one goes first, then one,
two, four ..., so many as went before. The first rows are there after one item's time, and a job of n items
takes 1 + log2(n) forwards in place of one. What its share leaves free in a batch is for the items of others,
so throughput falls only while such a job is alone. Jobs whose readers wait for READY keep to no share.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar


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
    taken: Counter[int] = Counter()  # items of each job in the batch
    for candidate in sorted(waiting, key=lambda item: item.order):
        if batch and candidate.batch_key != batch[0].batch_key:
            continue
        if taken[candidate.job_key] >= candidate.job_share:
            continue
        if batch and patches + candidate.cost_patches > max_patches:
            continue
        batch.append(candidate)
        taken[candidate.job_key] += 1
        patches += candidate.cost_patches
        if len(batch) == max_items:
            break
    return batch
