"""Which worker encodes what, and what happens to an encode that has no worker now, or loses it.

Called by `app.engine` (submit, abandon), by `app.completions` when credit comes back, and by the supervisor
when a worker becomes ready or is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from app.errors import NoWorkerReady, WorkerLost
from app.inflight import Attempt, Flight, Inflight
from app.worker import Worker, WorkerCondition

ATTEMPTS_MAX = 2


class Workforce(Protocol):
    """What dispatch asks of the supervisor."""

    def workers(self) -> Iterable[Worker]:
        """Those whose processes live, in order of place."""

    def expects_a_worker(self) -> bool:
        """Whether a worker is starting, or about to be started."""


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """waiting: flights without a worker now. The others count since the start."""

    waiting: int
    dispatched: int
    retried: int


class Dispatch:
    """Flights that wait for a worker, oldest first, and the choice among the workers."""

    def __init__(self, inflight: Inflight, workforce: Workforce) -> None:
        self._inflight = inflight
        self._workforce = workforce
        self._waiting: deque[Flight] = deque()
        self._tickets = count(1)
        self._last_place = -1
        self._dispatched = 0
        self._retried = 0

    def submit(self, flight: Flight) -> None:
        """Find the flight a worker, now or while its waiters wait. Admission bounds how many there are."""
        self._waiting.append(flight)
        self.pump()

    def pump(self) -> None:
        """Give waiting flights to workers as far as there is credit; 503 for all if no worker will come."""
        while self._waiting:
            worker = self._least_pending()
            if worker is None or not self._try_assign(self._waiting[0], worker):
                break
            self._waiting.popleft()
        if self._waiting and not self._hope():
            self._give_up()

    def abandon(self, flight: Flight) -> None:
        """Nobody wants this encode any more: drop it before the forward, if that is still possible."""
        self._inflight.close_to_joiners(flight)
        if flight.attempt is not None:
            flight.attempt.worker.cancel(flight.attempt)
        elif flight in self._waiting:
            self._waiting.remove(flight)
            self._inflight.end(flight)

    def worker_lost(self, worker: Worker) -> None:
        """After proof of its death: each of its tickets is tried once more elsewhere, or ends."""
        for attempt in reversed(list(worker.attempts.values())):
            worker.settle(attempt)
            attempt.flight.attempt = None
            self._retry_or_end(attempt.flight)
        self.pump()

    def statistics(self) -> DispatchStatistics:
        """Counts, now."""
        return DispatchStatistics(len(self._waiting), self._dispatched, self._retried)

    def _least_pending(self) -> Worker | None:
        """The worker with the fewest items, then tickets, outstanding; the next in turn among equals."""
        able = [worker for worker in self._workforce.workers() if worker.can_take_work]
        if not able:
            return None
        places = 1 + max(worker.place for worker in able)
        turn = self._last_place + 1
        return min(
            able,
            key=lambda worker: (worker.pending_items, len(worker.attempts), (worker.place - turn) % places),
        )

    def _try_assign(self, flight: Flight, worker: Worker) -> bool:
        attempt = Attempt(next(self._tickets), flight.attempts_made + 1, flight, worker)
        if not worker.assign(attempt):
            return False
        flight.attempt = attempt
        flight.attempts_made += 1
        self._last_place = worker.place
        self._dispatched += 1
        return True

    def _retry_or_end(self, flight: Flight) -> None:
        if not flight.is_wanted:
            self._inflight.end(flight)
        elif flight.shape_given or flight.attempts_made >= ATTEMPTS_MAX:
            # A handle that was given out never moves to another block: its reader learns it from the header.
            flight.fail(WorkerLost("the worker died before the encode was done", retry_after_s=1.0))
            self._inflight.end(flight)
        else:
            self._retried += 1
            self._waiting.appendleft(flight)

    def _hope(self) -> bool:
        """Whether any worker lives or is expected, so that waiting makes sense."""
        return self._workforce.expects_a_worker() or any(
            worker.condition is WorkerCondition.READY for worker in self._workforce.workers()
        )

    def _give_up(self) -> None:
        while self._waiting:
            flight = self._waiting.popleft()
            flight.fail(NoWorkerReady("no worker is ready and none is expected", retry_after_s=10.0))
            self._inflight.end(flight)
