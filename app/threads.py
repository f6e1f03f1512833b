"""Work that takes too long for the event loop, or that waits: in a thread, waited for to its end."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_to_the_end(work: Callable[[], Result]) -> Result:
    """work in a thread. A cancelled caller still waits for the thread: it writes to memory that the caller
    gives back next."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what the caller hears of
        raise
