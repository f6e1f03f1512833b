"""app.lifetime: whatever ends a request first is what its caller sees."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from app.errors import DeadlinePassed, Draining, RequestCancelled
from app.lifetime import Lifetime
from tests.app.serving import run

LATER_NS = 1_000_000_000_000


def far_deadline() -> int:
    return time.monotonic_ns() + LATER_NS


def test_a_deadline_ends_the_block() -> None:
    async def main() -> None:
        with pytest.raises(DeadlinePassed):
            async with Lifetime(time.monotonic_ns()):
                await asyncio.Event().wait()

    run(main())


def test_a_disconnect_ends_the_block_and_messages_before_it_do_not() -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()

    async def main() -> None:
        async with Lifetime(far_deadline()) as lifetime:
            lifetime.watch_for_disconnect(messages.get)
            messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
            messages.put_nowait({"type": "http.disconnect"})
            await asyncio.Event().wait()

    with pytest.raises(RequestCancelled):
        run(main())


def test_the_first_cause_counts() -> None:
    async def main() -> None:
        async with Lifetime(far_deadline()) as lifetime:
            asyncio.get_running_loop().call_soon(lifetime.end, Draining("first"))
            asyncio.get_running_loop().call_soon(lifetime.end, RequestCancelled("second"))
            await asyncio.Event().wait()

    with pytest.raises(Draining, match="first"):
        run(main())


def test_somebody_elses_cancellation_goes_through() -> None:
    async def work() -> None:
        async with Lifetime(far_deadline()):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_block_that_is_done_has_its_result_and_its_task_stays_usable() -> None:
    async def main() -> str:
        async with Lifetime(far_deadline()) as lifetime:
            result = "done"
        lifetime.end(Draining("too late"))
        await asyncio.sleep(0)
        return result

    assert run(main()) == "done"


def test_an_error_of_the_block_is_not_hidden() -> None:
    async def main() -> None:
        async with Lifetime(far_deadline()):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        run(main())
