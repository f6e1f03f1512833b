"""Names to addresses, in threads that nothing waits for at the end. Used by `app.fetch`.

The C library's resolver cannot be stopped and takes up to 45 s over a name whose server is silent. In the
loop's own pool four such names would delay every other look-up, and the process could not end before them.
So each name has a daemonic thread, and requests for the same name share it.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, Final

from app.addresses import Address
from app.errors import QueueFull

MAX_LOOKUPS: Final = 64

Answers = list[tuple[Any, ...]]


class Resolver:
    """One per fetcher. lookup: as socket.getaddrinfo."""

    def __init__(self, lookup: Callable[..., Answers] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._under_way: dict[tuple[str, int], asyncio.Future[Answers]] = {}

    async def addresses(self, host: str, port: int) -> list[Address]:
        """All addresses of the name. OSError or UnicodeError if it has none; QueueFull if too many others are
        being looked up."""
        future = self._under_way.get((host, port)) or self._begin(host, port)
        # Shielded: who is cancelled leaves, the look-up goes on for those who asked for the same name.
        answers = await asyncio.shield(future)
        return [ip_address(address[0]) for *_, address in answers if isinstance(address[0], str)]

    def _begin(self, host: str, port: int) -> asyncio.Future[Answers]:
        if len(self._under_way) >= MAX_LOOKUPS:
            raise QueueFull(f"{MAX_LOOKUPS} host names are being looked up", retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answers] = loop.create_future()
        self._under_way[host, port] = future
        future.add_done_callback(partial(self._ended, (host, port)))
        thread = threading.Thread(
            target=self._run, args=(loop, future, host, port), name="resolver", daemon=True
        )
        thread.start()
        return future

    def _run(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Answers], host: str, port: int
    ) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(future.set_result, self._lookup(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            settle = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended meanwhile
            loop.call_soon_threadsafe(settle)

    def _ended(self, key: tuple[str, int], future: asyncio.Future[Answers]) -> None:
        del self._under_way[key]
        if not future.cancelled():
            future.exception()  # seen, even if nobody waits any more
