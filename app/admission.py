"""Who may start work: permits under a limit, and the daemon's way from serving to stopped.

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

RETRY_AFTER_S = 1.0


class Work(Protocol):
    """What holds a permit."""

    def end(self, cause: RequestError) -> None:
        """Stop, for this cause. The permit comes back soon after."""


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts since start; in_flight is now."""

    in_flight: int
    admitted: int
    refused: int


class Admission:
    """Permits for requests. Three states: serving, leaving (readyz says no, work goes on), closed."""

    def __init__(self, max_in_flight: int, some_worker_ready: Callable[[], bool]) -> None:
        self._max_in_flight = max_in_flight
        self._some_worker_ready = some_worker_ready
        self._work: set[Work] = set()
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
    async def permit(self, deadline_ns: int) -> AsyncIterator[Lifetime]:
        """One request's right to work, until its block ends. Draining, NoWorkerReady or QueueFull."""
        lifetime = Lifetime(deadline_ns)
        self.admit(lifetime)
        try:
            async with lifetime:
                yield lifetime
        finally:
            self.give_back(lifetime)

    def admit(self, work: Work) -> None:
        """A permit for work that is not a task; `give_back` ends it. Errors as `permit`."""
        try:
            self._check()
        except (Draining, NoWorkerReady, QueueFull):
            self._refused += 1
            raise
        self._admitted += 1
        self._work.add(work)
        self._idle.clear()

    def give_back(self, work: Work) -> None:
        """The work is over."""
        self._work.discard(work)
        if not self._work:
            self._idle.set()

    def _check(self) -> None:
        if self._closed:
            raise Draining("the daemon is stopping", retry_after_s=RETRY_AFTER_S)
        if not self._some_worker_ready():
            raise NoWorkerReady("no worker is ready", retry_after_s=RETRY_AFTER_S)
        if len(self._work) >= self._max_in_flight:
            raise QueueFull(
                f"{len(self._work)} requests are under way; the limit is {self._max_in_flight}",
                retry_after_s=RETRY_AFTER_S,
            )

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
        return AdmissionStatistics(len(self._work), self._admitted, self._refused)
