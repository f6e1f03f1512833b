"""Who may start work: permits under two limits, and the daemon's way from serving to stopped.

What cannot be worked on soon is not let in: 429 or 503 at once, with the time after which to come again. That
is how long the work under way takes at the rate measured lately.

One Admission per daemon. `app.encode` takes a permit before it reads a body, `app.session_encodes` before it
copies one; `app.server` drains it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from app.errors import Draining, NoWorkerReady, QueueFull, RequestError
from app.lifetime import Lifetime
from app.rate import CompletionRate

RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 60.0


class Work(Protocol):
    """What holds a permit."""

    def end(self, cause: RequestError) -> None:
        """Stop, for this cause. The permit comes back soon after."""


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts since start; in_flight, queued_bytes (media of those in flight) and per_second (completions,
    measured lately) are now."""

    in_flight: int
    admitted: int
    refused: int
    queued_bytes: int = 0
    per_second: float = 0.0


class Admission:
    """Permits for requests. Three states: serving, leaving (readyz says no, work goes on), closed."""

    def __init__(
        self,
        max_in_flight: int,
        some_worker_ready: Callable[[], bool],
        *,
        max_queued_bytes: int = 1 << 62,
        check_room: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """check_room(nbytes) raises MemoryFull or QueueFull if memory or rings have no room for a request
        with so many bytes of media."""
        self._max_in_flight = max_in_flight
        self._max_queued_bytes = max_queued_bytes
        self._some_worker_ready = some_worker_ready
        self._check_room = check_room
        self._work: dict[Work, int] = {}
        self._queued_bytes = 0
        self._rate = CompletionRate()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        self._closed = False
        self._admitted = 0
        self._refused = 0

    @property
    def leaving(self) -> bool:
        """The daemon has been told to stop."""
        return self._leaving

    @property
    def closed(self) -> bool:
        """No new work is taken."""
        return self._closed

    @asynccontextmanager
    async def permit(self, deadline_ns: int, nbytes: int = 0) -> AsyncIterator[Lifetime]:
        """One request's right to work, until its block ends. nbytes: of media, as far as it is known.

        Draining, NoWorkerReady, QueueFull or MemoryFull.
        """
        lifetime = Lifetime(deadline_ns)
        self.admit(lifetime, nbytes)
        try:
            async with lifetime:
                yield lifetime
        finally:
            self.give_back(lifetime)

    def admit(self, work: Work, nbytes: int = 0) -> None:
        """A permit for work that is not a task; `give_back` ends it. Errors as `permit`."""
        try:
            self._check(nbytes)
        except RequestError as refusal:
            self._refused += 1
            refusal.retry_after_s = self.retry_after_s()
            raise
        if not self._work:
            self._rate.begin()
        self._admitted += 1
        self._work[work] = nbytes
        self._queued_bytes += nbytes
        self._idle.clear()

    def resize(self, work: Work, nbytes: int) -> None:
        """The work turned out to have so many bytes of media. It stays admitted; others may not be."""
        self._queued_bytes += nbytes - self._work[work]
        self._work[work] = nbytes

    def give_back(self, work: Work) -> None:
        """The work is over."""
        self._queued_bytes -= self._work.pop(work)
        self._rate.completed()
        if not self._work:
            self._idle.set()

    def retry_after_s(self) -> float:
        """When what is under way will be done, between 1 and 60 seconds."""
        wait_s = self._rate.seconds_for(max(1, len(self._work)))
        return min(max(wait_s, RETRY_AFTER_S), RETRY_AFTER_MAX_S)

    def _check(self, nbytes: int) -> None:
        if self._closed:
            raise Draining("the daemon is stopping")
        if not self._some_worker_ready():
            raise NoWorkerReady("no worker is ready")
        if len(self._work) >= self._max_in_flight:
            raise QueueFull(f"{len(self._work)} requests are under way; the limit is {self._max_in_flight}")
        if self._work and self._queued_bytes + nbytes > self._max_queued_bytes:
            raise QueueFull(
                f"{self._queued_bytes} bytes of media are under way; the limit is {self._max_queued_bytes}"
            )
        self._check_room(nbytes)

    def leave(self) -> None:
        """readyz turns to 503 at once; work is still taken."""
        self._leaving = True

    def close(self) -> None:
        """No new work from here on."""
        self._leaving = self._closed = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every permit came back within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """End what is left with 503: the drain's limit has passed."""
        for work in list(self._work):
            work.end(Draining("the daemon stopped before this was done", retry_after_s=RETRY_AFTER_S))

    def statistics(self) -> AdmissionStatistics:
        """What was let in and what was not."""
        return AdmissionStatistics(
            len(self._work), self._admitted, self._refused, self._queued_bytes, self._rate.per_second()
        )
