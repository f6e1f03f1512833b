"""What the pipeline of rank 0 needs of the other ranks of its tensor-parallel group. Most workers have none.

group.py has the two kinds of group; this file has what they share with `Alone`, a worker of one process.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from gpu_workers.backlog import EncodeResult
from gpu_workers.deliver import Answers
from gpu_workers.families.base import Family, Prepared, Rows
from gpu_workers.jobs import Item, Job


class HandedOut(NamedTuple):
    """A batch after its plan went out: the items for this rank's device, and what the others will answer."""

    own: list[Item]
    answers: Answers


class Ranks(Protocol):
    """All ranks of a worker, as rank 0 sees them."""

    answer_later: bool  # whether preprocess and answers may wait for another process

    def preprocess(self, item: Item) -> Prepared:
        """Decode and preprocess the item on the ranks that will forward it. ItemError. Any prepare thread."""

    def hand_out(self, batch: list[Item]) -> HandedOut:
        """Give the other ranks their items of this batch. Device thread only, as is forward."""

    def forward(self, batch: list[Item], attempt: Callable[[], list[Rows]]) -> list[Rows]:
        """Run attempt, which is this rank's forward of these items, beside those of the other ranks.

        Raises what attempt raises. RanksDisagree if others fared differently: the group must end.
        """

    def forget(self, job: Job) -> None:
        """The job has failed, and no thread holds an item of it: what the ranks still have of it can go."""


class NoAnswers:
    """There is nobody else."""

    def wait(self) -> list[EncodeResult]:
        """Nothing."""
        return []


class Alone:
    """One process that is a worker by itself, or a rank that does what rank 0 planned."""

    answer_later = False

    def __init__(self, family: Family) -> None:
        self._family = family

    def preprocess(self, item: Item) -> Prepared:
        """By the family."""
        return self._family.preprocess(item.media, item.plan)

    def hand_out(self, batch: list[Item]) -> HandedOut:
        """Everything stays here."""
        return HandedOut(batch, NoAnswers())

    def forward(self, batch: list[Item], attempt: Callable[[], list[Rows]]) -> list[Rows]:
        """The attempt alone."""
        return attempt()

    def forget(self, job: Job) -> None:
        """Nobody has anything of it."""
