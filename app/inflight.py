"""Every encode under way, who waits for it, and the input block it holds. Private memory of control.

A Flight begins with the first request for some content and ends with its ticket (or without one, if it never
got a worker). Requests for the same content that come meanwhile join it, whatever their req_id; each has its
own deadline, and the flight has the latest of them. One try on one worker is an Attempt: `app.dispatch` makes
it, `app.completions` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from app.cost import CostModel
from app.errors import DuplicateRequest, RequestError
from app.jobs import Encoded, EncodeJob, State, Timings, Wait

if TYPE_CHECKING:
    from app.segments import Block
    from app.worker import Worker

Waiter = asyncio.Future[Encoded]


class Listener(Protocol):
    """Who waits without a task: told at once, from the callback that saw it happen, and only once.

    Neither method may end the flight, its block's leases or a session: that comes in a turn of its own.
    """

    def answered(self, outcome: Outcome) -> None:
        """The block is there: take a lease on it now, or never."""

    def failed(self, error: RequestError) -> None:
        """There will be no block."""


class Outcome(NamedTuple):
    """What became of a flight: its block is READY, or FILLING with its shape known."""

    block: Block
    state: State
    timings: Timings
    attempt: int


@dataclass(slots=True, eq=False)
class Attempt:
    """One ticket: a flight on one worker. number counts a flight's attempts from 1. cost is in rows, an
    estimate until its shape is known.

    block is what the worker reported for it, from SHAPE_KNOWN on.
    """

    ticket: int
    number: int
    flight: Flight
    worker: Worker
    cost: int = 1
    block: Block | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """One encode and everybody who waits for its answer.

    attempts are those that have not ended: none while it waits for a worker, two when a stuck worker's was
    tried elsewhere too. is_over: its outcome is known; attempts that still run only have to end. given: the
    attempt whose block somebody has a handle to, though it is still being filled: the encode must end in that
    very block. deadline_ns: of the last who waits. keys: the req_keys that joined. is_harmless: a worker was
    done with it, and lives.
    """

    job: EncodeJob
    deadline_ns: int
    keys: set[str] = field(default_factory=set)
    waiters: set[Waiter] = field(default_factory=set)
    listeners: set[Listener] = field(default_factory=set)
    attempts_made: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    is_over: bool = False
    given: Attempt | None = None
    is_harmless: bool = False

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt under way."""
        return self.attempts[-1] if self.attempts else None

    def decides(self, attempt: Attempt) -> bool:
        """Whether the end of this attempt, of all that were made, may be the flight's."""
        return not self.is_over and self.given in (None, attempt)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for the answer or may hold a handle to the block already."""
        return bool(self.waiters or self.listeners) or self.given is not None

    def join(self) -> Waiter:
        """One more who waits; leaves with `leave`, answered or not."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self.waiters.add(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """This one waits no longer."""
        self.waiters.discard(waiter)
        waiter.cancel()

    def answer(self, outcome: Outcome, make: Callable[[Outcome], Encoded]) -> None:
        """Give everybody who waits an answer of its own (a lease of its own)."""
        for waiter in self._take_waiters():
            waiter.set_result(make(outcome))
        for listener in self._take_listeners():
            listener.answered(outcome)

    def fail(self, error: RequestError) -> None:
        """End everybody's wait with this error."""
        for waiter in self._take_waiters():
            waiter.set_exception(error)
        for listener in self._take_listeners():
            listener.failed(error)

    def _take_listeners(self) -> list[Listener]:
        listening = list(self.listeners)
        self.listeners.clear()
        return listening

    def _take_waiters(self) -> list[Waiter]:
        waiting = [waiter for waiter in self.waiters if not waiter.done()]
        self.waiters.clear()
        return waiting


@dataclass(frozen=True, slots=True)
class InflightStatistics:
    """flights: encodes not ended yet, abandoned ones included. joinable: those that a request for the same
    content would join. joined counts since the start the requests that did."""

    flights: int
    joinable: int
    joined: int
    waiters: int
    input_bytes: int


class Inflight:
    """The table of flights. Whatever enters ends, and its input block is freed then, once.

    costs: what flights cost their workers, learned from those that were here.
    """

    def __init__(self) -> None:
        self.costs = CostModel()
        self._flights: set[Flight] = set()
        self._by_key: dict[str, Flight] = {}
        self._by_content: dict[tuple[bytes, Wait], Flight] = {}
        self._joined = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def find(self, job: EncodeJob) -> Flight | None:
        """The flight that this job joins, or None. DuplicateRequest if its key flies with other content."""
        flight = self._by_key.get(job.req_key)
        if flight is None:
            return self._by_content.get((job.digest, job.wait))
        if (flight.job.digest, flight.job.wait) != (job.digest, job.wait):
            raise DuplicateRequest("req_id is under way with other media or another wait")
        return flight

    def open(self, job: EncodeJob) -> Flight:
        """A new flight; its input block is the table's from now on."""
        flight = Flight(job, job.deadline_ns)
        self._flights.add(flight)
        self._by_content[job.digest, job.wait] = flight
        self._name(flight, job.req_key)
        self._empty.clear()
        return flight

    def join(self, flight: Flight, job: EncodeJob) -> None:
        """One more request for what flies already; its own input block is not needed."""
        job.block.free()
        flight.deadline_ns = max(flight.deadline_ns, job.deadline_ns)
        self._name(flight, job.req_key)
        self._joined += 1

    def close_to_joiners(self, flight: Flight) -> None:
        """Nobody joins this one any more: it was abandoned, or is over."""
        for key in flight.keys:
            del self._by_key[key]
        flight.keys.clear()
        content = (flight.job.digest, flight.job.wait)
        if self._by_content.get(content) is flight:
            del self._by_content[content]

    def attempt_ended(self, attempt: Attempt) -> None:
        """The worker will say no more about this ticket. The last one of a flight that is over ends it."""
        flight = attempt.flight
        attempt.worker.settle(attempt)
        flight.attempts.remove(attempt)
        if flight.is_over and not flight.attempts:
            self.end(flight)

    def conclude(self, flight: Flight) -> None:
        """The flight's outcome is known: what still runs for it is cancelled, and the last to end ends it."""
        flight.is_over = True
        self.close_to_joiners(flight)
        for rival in flight.attempts:
            rival.worker.cancel(rival)
        if not flight.attempts:
            self.end(flight)

    def end(self, flight: Flight) -> None:
        """The flight is over: its last ticket has ended, or it never gets one."""
        self.close_to_joiners(flight)
        self._flights.remove(flight)
        flight.job.block.free()
        if not self._flights:
            self._empty.set()

    def fail_all(self, error: RequestError) -> None:
        """Answer everybody who still waits with this error. The tickets end when their workers do."""
        for flight in self._flights:
            flight.fail(error)

    async def wait_empty(self) -> None:
        """Until no encode is under way. The caller sets the time limit."""
        await self._empty.wait()

    def _name(self, flight: Flight, key: str) -> None:
        self._by_key[key] = flight
        flight.keys.add(key)

    def statistics(self) -> InflightStatistics:
        """Counts, now."""
        return InflightStatistics(
            flights=len(self._flights),
            joinable=len(self._by_content),
            joined=self._joined,
            waiters=sum(len(flight.waiters) + len(flight.listeners) for flight in self._flights),
            input_bytes=sum(flight.job.block.nbytes for flight in self._flights),
        )
