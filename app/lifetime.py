"""How long one request may live: until it is done, its client goes, its deadline passes or the drain ends.

`app.admission` hands one out with each permit; the block under it is cancelled with the cause that came
first, and that cause is what the caller sees.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from starlette.types import Receive

from app.errors import DeadlinePassed, RequestCancelled, RequestError


class Lifetime:
    """Async context manager around a request's work, in the task that does it.

    end(cause) from anywhere on the loop cancels the block, and leaving it raises the cause (the same
    contract as asyncio.timeout, with more than one reason to stop).
    """

    def __init__(self, deadline_ns: int) -> None:
        self.deadline_ns = deadline_ns
        self._cause: RequestError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling_before = self._task.cancelling()
        remaining_s = (self.deadline_ns - time.monotonic_ns()) / 1e9
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            max(remaining_s, 0.0), self.end, DeadlinePassed("the deadline passed before the encode was done")
        )
        return self

    def end(self, cause: RequestError) -> None:
        """Cancel the block. Only the first cause counts."""
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()

    def watch_for_disconnect(self, receive: Receive) -> None:
        """From here on nobody else reads from receive: the next message is the client's going."""
        self._watcher = asyncio.create_task(self._wait_for_disconnect(receive))

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(RequestCancelled("the client went away"))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._cause is not None:
            # Our own cancel is taken back; somebody else's, if there is one, goes on.
            foreign = task.uncancel() > self._cancelling_before
            if not foreign and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise self._cause from None
