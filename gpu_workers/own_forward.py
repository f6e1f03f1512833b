"""This rank's forward beside those of ranks that share its weights: can it still end when another's failed?

A forward stands still in a collective that some rank never enters. So a rank whose forward fails says how
many collectives it had entered. Ranks that fail alike entered as many, and the group goes on; a rank that has
entered more stands still, and ends its process, with which control ends the group. Used by group.py on rank
0 and by rank.py on the others.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gpu_workers.errors import RanksDisagree

# How often `watch` looks at the count, since torch rings nobody when a collective is entered. It looks only
# while another rank's forward has failed and this one's has not ended: no time is spent otherwise.
_LOOK_SECONDS: Final = 0.02


class OwnForward:
    """One forward at a time, of batches with rising numbers."""

    def __init__(self, entered: Callable[[], int]) -> None:
        """entered: how many collectives this process has entered so far; any thread calls it."""
        self._entered = entered
        self._changed = threading.Condition()
        self._batch = 0
        self._before = 0  # what `entered` was when the batch began
        self._over = 0  # the last batch whose forward has ended

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Runs in here."""
        with self._changed:
            self._batch, self._before = batch, self._entered()
        try:
            yield
        finally:
            with self._changed:
                self._over = batch
                self._changed.notify_all()

    def collectives(self) -> int:
        """How many this rank has entered since its last batch began."""
        return self._entered() - self._before

    def watch(self, batch: int, collectives: int) -> None:
        """Another rank's forward of this batch failed after so many collectives: returns once our own has
        ended too. RanksDisagree if it never will."""
        with self._changed:
            while self._over < batch:
                if self._batch == batch and self.collectives() > collectives:
                    raise RanksDisagree(f"the forward of batch {batch} failed on another rank alone")
                self._changed.wait(_LOOK_SECONDS)
