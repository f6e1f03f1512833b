"""Flights whose worker died under them, tried again apart from all others. Private memory of control.

A worker's death accuses everything that it had, though mostly one item is to blame. So the suspects are split
into groups, and each group has a worker for itself. A group that comes through is cleared; one whose worker
dies is split again, until the guilty one dies alone, which is the proof that `app.poison` waits for. Among n
suspects that takes about log4(n) deaths, and no innocent pays with more than its time.

`app.dispatch` owns it, fills it after a death, and assigns what it hands out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from app.inflight import Flight
    from app.worker import Worker

# Groups that suspects are split into: halves need twice the deaths, eighths twice the trials.
PARTS: Final = 4


@dataclass(slots=True, eq=False)
class Trial:
    """One group that has a worker for itself.

    untried: those that its ring had no room for yet. flights: all, for the verdict.
    """

    worker: Worker
    untried: deque[Flight]
    flights: list[Flight]

    @property
    def is_survived(self) -> bool:
        """Whether the worker has lived through all of it."""
        return not self.untried and not self.worker.attempts


class Quarantine:
    """Groups of suspects that wait for an idle worker, the next first, and those that have one."""

    def __init__(self) -> None:
        self._groups: deque[deque[Flight]] = deque()
        self._trials: dict[Worker, Trial] = {}

    def __bool__(self) -> bool:
        """Whether there is anybody in it."""
        return bool(self._groups or self._trials)

    def split(self, suspects: list[Flight]) -> None:
        """A worker died of one of these, oldest first: they go before the groups that wait already."""
        size = -(-len(suspects) // PARTS)
        groups = [deque(suspects[start : start + size]) for start in range(0, len(suspects), size or 1)]
        self._groups.extendleft(reversed(groups))

    def admit(self, suspect: Flight) -> None:
        """One whose content is suspected already: a group of its own, after the others."""
        self._groups.append(deque([suspect]))

    @property
    def has_waiting(self) -> bool:
        """Whether a group has no worker yet."""
        return bool(self._groups)

    @property
    def wants_a_worker(self) -> bool:
        """Whether a worker should become idle for the next group: the groups share one, if the others have
        other work."""
        return bool(self._groups) and not self._trials

    @property
    def waiting(self) -> int:
        """Flights that no worker has."""
        return sum(map(len, self._groups)) + sum(len(trial.untried) for trial in self._trials.values())

    def holds(self, worker: Worker) -> bool:
        """Whether this worker is for suspects only."""
        return worker in self._trials

    def begin(self, worker: Worker) -> None:
        """The next group has this idle worker for itself."""
        group = self._groups.popleft()
        self._trials[worker] = Trial(worker, group, list(group))

    def trials(self) -> Iterable[Trial]:
        """Every group that has a worker."""
        return self._trials.values()

    def end_survived(self) -> Iterator[bytes]:
        """End the trials that are over; the contents that are cleared by them. What was cancelled before its
        worker came to it stays a suspect."""
        for trial in [trial for trial in self._trials.values() if trial.is_survived]:
            del self._trials[trial.worker]
            yield from (flight.job.digest for flight in trial.flights if flight.is_harmless)

    def end(self, worker: Worker) -> list[Flight]:
        """The worker died: those of its group that it never had."""
        trial = self._trials.pop(worker, None)
        return list(trial.untried) if trial else []

    def remove(self, flight: Flight) -> bool:
        """Nobody wants this one any more; whether it waited here for a worker."""
        for group in (*self._groups, *(trial.untried for trial in self._trials.values())):
            if flight in group:
                group.remove(flight)
                self._groups = deque(filter(None, self._groups))
                return True
        return False

    def take_all(self) -> list[Flight]:
        """Everybody who waits for a worker: there will be none."""
        waiting = [flight for group in self._groups for flight in group]
        waiting += [flight for trial in self._trials.values() for flight in trial.untried]
        self._groups.clear()
        for trial in self._trials.values():
            trial.untried.clear()
        return waiting
