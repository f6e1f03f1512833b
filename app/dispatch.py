"""Which worker encodes what, and what happens to an encode that has no worker now, or loses it.

Called by `app.engine` (submit, abandon), by `app.completions` when credit comes back, and by the supervisor
when a worker becomes ready, is lost, or has made no progress for a while.

The choice: the least outstanding cost among the workers that take work and are not slow; one whose segment is
full only if all are; the next in turn among equals. What a worker died of, perhaps, is tried apart from the
rest (`app.quarantine`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from app.errors import MemoryFull, NoWorkerReady, PoisonInput, QueueFull, WorkerLost
from app.inflight import Attempt, Flight, Inflight
from app.poison import PoisonGuard
from app.quarantine import Quarantine
from app.worker import Worker, WorkerCondition

RESCUED_ATTEMPTS_MAX = 2  # what hangs one worker may hang another, but not all


class Workforce(Protocol):
    """What dispatch asks of the supervisor."""

    def workers(self) -> Iterable[Worker]:
        """Those whose processes live, in order of place."""

    def expects_a_worker(self) -> bool:
        """Whether a worker is starting, or about to be started."""


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """waiting: flights without a worker now; suspects: contents that a worker died of lately, perhaps. The
    others count since the start: retried after a worker's death, rescued from a stuck worker, dropped because
    nobody waited any more when they had no worker yet."""

    waiting: int
    dispatched: int
    retried: int
    rescued: int
    dropped: int
    suspects: int


class Dispatch:
    """Flights that wait for a worker, oldest first, and the choice among the workers."""

    def __init__(self, inflight: Inflight, workforce: Workforce) -> None:
        self._inflight = inflight
        self._workforce = workforce
        self._poison = PoisonGuard()
        self._quarantine = Quarantine()
        self._waiting: deque[Flight] = deque()
        self._tickets = count(1)
        self._last_place = -1
        self._dispatched = 0
        self._retried = 0
        self._rescued = 0
        self._dropped = 0

    def check_room(self) -> None:
        """QueueFull if every ready worker has as many tickets as it may, or a full ring; MemoryFull if no
        segment has room. For admission: what waits already goes first."""
        ready = []
        for worker in self._workforce.workers():
            if worker.can_take_work and worker.has_room:
                return
            if worker.condition is WorkerCondition.READY:
                ready.append(worker)
        if ready and not any(worker.can_take_work for worker in ready):
            raise QueueFull("no worker's ring has room")
        if ready and not any(worker.has_room for worker in ready):
            for worker in ready:
                worker.segment.expected_run.doubt()
            raise MemoryFull("the workers' segments are full; release handles or come again")

    def check_content(self, digest: bytes) -> None:
        """PoisonInput if it is proved that workers die of this content."""
        self._poison.check(digest)

    def submit(self, flight: Flight) -> None:
        """Find the flight a worker, now or while its waiters wait. Admission bounds how many there are."""
        if self._poison.suspects_content(flight.job.digest):
            self._quarantine.admit(flight)
        else:
            self._waiting.append(flight)
        self.pump()

    def pump(self) -> None:
        """Give waiting flights to workers as far as there is credit; 503 for all if no worker will come."""
        if self._quarantine:
            self._try_suspects()
        while self._waiting:
            worker = self._cheapest()
            if worker is None or not self._try_assign(self._waiting[0], worker):
                break
            self._waiting.popleft()
        if (self._waiting or self._quarantine.has_waiting) and not self._hope():
            self._give_up()

    def abandon(self, flight: Flight) -> None:
        """Nobody wants this encode any more: drop it before the forward, if that is still possible."""
        self._inflight.close_to_joiners(flight)
        for attempt in flight.attempts:
            attempt.worker.cancel(attempt)
        if not flight.attempts and self._take_back(flight):
            self._dropped += 1
            self._inflight.conclude(flight)

    def rescue(self) -> None:
        """Try what slow workers have on others too: the first result wins, the other's block goes back."""
        for slow in [worker for worker in self._workforce.workers() if worker.is_slow]:
            if self._quarantine.holds(slow):
                continue
            for stuck in list(slow.attempts.values()):
                if not _may_run_twice(stuck.flight):
                    continue
                other = self._cheapest()
                if other is None or not self._try_assign(stuck.flight, other):
                    return
                self._rescued += 1

    def worker_lost(self, worker: Worker) -> None:
        """After proof of its death: what it had is tried again apart from the rest, or ends."""
        homeless = self._quarantine.end(worker)
        attempts = list(worker.attempts.values())
        is_accused = not worker.is_asked_to_stop
        if is_accused:
            self._poison.worker_died(attempt.flight.job.digest for attempt in attempts)
        lost = []
        for attempt in attempts:
            self._inflight.attempt_ended(attempt)
            if self._is_homeless(attempt) and self._may_go_on(attempt.flight):
                lost.append(attempt.flight)
        self._retried += len(lost)
        if is_accused:
            self._quarantine.split(homeless)
            self._quarantine.split(lost)
        else:
            self._put_back(lost + homeless)
        self.pump()

    def try_again(self, flight: Flight) -> None:
        """Its worker gave it back unfinished, though nothing is wrong with it."""
        self._retried += 1
        self._put_back([flight])
        self.pump()

    def statistics(self) -> DispatchStatistics:
        """Counts, now."""
        return DispatchStatistics(
            len(self._waiting) + self._quarantine.waiting, self._dispatched, self._retried, self._rescued,
            self._dropped, self._poison.suspects,
        )  # fmt: skip

    def _able(self) -> list[Worker]:
        """Who can take work now, whatever it is."""
        return [
            worker
            for worker in self._workforce.workers()
            if worker.can_take_work and not worker.is_slow and not self._quarantine.holds(worker)
        ]

    def _cheapest(self) -> Worker | None:
        """Who gets the next flight; None: nobody can take one now."""
        able = self._able()
        if able and self._quarantine.wants_a_worker:
            able.remove(_least_loaded(able))  # it gets no more, so that it will be idle and suspects have it
        if len(able) < 2:
            return able[0] if able else None
        places = 1 + max(worker.place for worker in able)
        turn = self._last_place + 1
        return min(
            able,
            key=lambda worker: (not worker.has_room, worker.outstanding_cost, (worker.place - turn) % places),
        )

    def _try_suspects(self) -> None:
        """End the trials that were survived, and begin others while a worker is idle."""
        for digest in self._quarantine.end_survived():
            self._poison.clear(digest)
        for worker in self._able():
            if self._quarantine.has_waiting and not worker.attempts:
                self._quarantine.begin(worker)
        for trial in self._quarantine.trials():
            while trial.untried and self._try_assign(trial.untried[0], trial.worker):
                trial.untried.popleft()

    def _try_assign(self, flight: Flight, worker: Worker) -> bool:
        cost = self._inflight.costs.estimate(flight.job)
        attempt = Attempt(next(self._tickets), flight.attempts_made + 1, flight, worker, cost)
        if not worker.assign(attempt):
            return False
        flight.attempts.append(attempt)
        flight.attempts_made += 1
        self._last_place = worker.place
        self._dispatched += 1
        return True

    def _is_homeless(self, lost: Attempt) -> bool:
        """Whether the flight has no other attempt that could still win."""
        flight = lost.flight
        return not flight.is_over and (not flight.attempts or flight.given is lost)

    def _may_go_on(self, flight: Flight) -> bool:
        """Whether it is tried again; otherwise it has ended, for everybody who waits."""
        if not flight.is_wanted:
            self._inflight.conclude(flight)
            return False
        try:
            if flight.given is not None:
                # A handle that was given out never moves to another block: its reader learns it from the
                # header.
                raise WorkerLost("the worker died before the encode was done", retry_after_s=1.0)
            self._poison.check(flight.job.digest)
        except (WorkerLost, PoisonInput) as error:
            self._inflight.conclude(flight)
            flight.fail(error)
            return False
        return True

    def _put_back(self, flights: list[Flight]) -> None:
        """Nothing new is known of these, oldest first: suspects among suspects, the others before all who
        wait."""
        innocent = []
        for flight in flights:
            if self._poison.suspects_content(flight.job.digest):
                self._quarantine.admit(flight)
            else:
                innocent.append(flight)
        self._waiting.extendleft(reversed(innocent))

    def _take_back(self, flight: Flight) -> bool:
        if flight in self._waiting:
            self._waiting.remove(flight)
            return True
        return self._quarantine.remove(flight)

    def _hope(self) -> bool:
        """Whether any worker lives or is expected, so that waiting makes sense."""
        return self._workforce.expects_a_worker() or any(
            worker.condition is WorkerCondition.READY for worker in self._workforce.workers()
        )

    def _give_up(self) -> None:
        hopeless = [*self._quarantine.take_all(), *self._waiting]
        self._waiting.clear()
        for flight in hopeless:
            self._inflight.conclude(flight)
            flight.fail(NoWorkerReady("no worker is ready and none is expected", retry_after_s=10.0))


def _least_loaded(workers: list[Worker]) -> Worker:
    return min(workers, key=lambda worker: worker.outstanding_cost)


def _may_run_twice(flight: Flight) -> bool:
    """Whether somebody waits for it who has no handle yet, and it has had one attempt only."""
    return (
        not flight.is_over
        and flight.is_wanted
        and flight.given is None
        and flight.attempts_made < RESCUED_ATTEMPTS_MAX
    )
