"""What goes into the next forward. Pure: no threads, no torch, no clock.

The policy: the item whose deadline is oldest always goes, whatever its size, so nothing starves. The others
follow in the same order as far as both limits allow; one that does not fit is passed over for smaller ones
behind it, and is first itself once those before it are gone. An item larger than max_patches goes alone.
"""

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


Candidate = TypeVar("Candidate", bound=Batchable)


def next_batch(waiting: Iterable[Candidate], max_items: int, max_patches: int) -> list[Candidate]:
    """The items of the next forward, oldest first; empty only if nothing waits."""
    batch: list[Candidate] = []
    patches = 0
    for candidate in sorted(waiting, key=lambda item: item.order):
        if batch and candidate.batch_key != batch[0].batch_key:
            continue
        if batch and patches + candidate.cost_patches > max_patches:
            continue
        batch.append(candidate)
        patches += candidate.cost_patches
        if len(batch) == max_items:
            break
    return batch
