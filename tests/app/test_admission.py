"""app.admission: permits under a limit, and the way out."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from app.admission import RETRY_AFTER_MAX_S, Admission
from app.errors import Draining, MemoryFull, NoWorkerReady, QueueFull, RequestError
from tests.app.serving import run


def deadline() -> int:
    return time.monotonic_ns() + 10**12


def counts(admission: Admission) -> tuple[int, int, int]:
    """In flight, admitted, refused."""
    statistics = admission.statistics()
    return statistics.in_flight, statistics.admitted, statistics.refused


def test_permits_end_at_the_limit_and_come_back() -> None:
    admission = Admission(2, lambda: True)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(admission.permit(deadline()))
            with pytest.raises(QueueFull, match="limit is 2") as caught:
                await stack.enter_async_context(admission.permit(deadline()))
            assert caught.value.retry_after_s
        async with admission.permit(deadline()):
            assert counts(admission) == (1, 3, 1)

    run(main())
    assert admission.statistics().in_flight == 0


def test_a_permit_comes_back_after_an_error_too() -> None:
    admission = Admission(1, lambda: True)

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(KeyError):
                async with admission.permit(deadline()):
                    raise KeyError

    run(main())
    assert counts(admission) == (0, 3, 0)


def test_without_a_ready_worker_nothing_is_admitted() -> None:
    async def main() -> None:
        with pytest.raises(NoWorkerReady):
            async with Admission(1, lambda: False).permit(deadline()):
                pass

    run(main())


def test_leaving_still_admits_and_closing_does_not() -> None:
    admission = Admission(1, lambda: True)

    async def main() -> None:
        admission.leave()
        async with admission.permit(deadline()):
            assert admission.leaving
            assert not admission.closed
        admission.close()
        with pytest.raises(Draining):
            async with admission.permit(deadline()):
                pass

    run(main())


def test_the_drain_waits_for_work_and_then_ends_it() -> None:
    admission = Admission(4, lambda: True)

    async def work() -> str:
        async with admission.permit(deadline()):
            await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])
        assert admission.statistics().in_flight == 3
        assert not await admission.wait_idle(0.01)
        admission.close()
        admission.abort()
        assert await admission.wait_idle(60)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Draining)

    run(main())


class Held:
    """Work that only holds its permit."""

    def end(self, cause: RequestError) -> None:
        raise AssertionError(cause)


def test_media_are_admitted_up_to_the_limit_of_bytes_and_one_request_always() -> None:
    admission = Admission(8, lambda: True, max_queued_bytes=100)
    large, small = Held(), Held()
    admission.admit(large, 1000)
    with pytest.raises(QueueFull, match="limit is 100"):
        admission.admit(small, 1)
    admission.resize(large, 60)
    admission.admit(small, 40)
    assert admission.statistics().queued_bytes == 100
    admission.give_back(large)
    admission.give_back(small)
    assert admission.statistics().queued_bytes == 0


def test_what_finds_no_room_in_memory_is_not_admitted() -> None:
    asked = []

    def check_room(nbytes: int) -> None:
        asked.append(nbytes)
        raise MemoryFull("no room")

    admission = Admission(8, lambda: True, check_room=check_room)
    with pytest.raises(MemoryFull) as caught:
        admission.admit(Held(), 7)
    assert asked == [7]
    assert caught.value.retry_after_s
    assert counts(admission) == (0, 0, 1)


def test_whoever_is_refused_is_told_how_long_the_work_under_way_takes() -> None:
    admission = Admission(1, lambda: True)
    assert admission.retry_after_s() == 1.0
    for _ in range(1000):
        work = Held()
        admission.admit(work)
        admission.give_back(work)
    assert 1.0 <= admission.retry_after_s() <= RETRY_AFTER_MAX_S
