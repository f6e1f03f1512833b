"""app.admission: permits under a limit, and the way out."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from app.admission import Admission, AdmissionStatistics
from app.errors import Draining, NoWorkerReady, QueueFull
from tests.app.serving import run


def deadline() -> int:
    return time.monotonic_ns() + 10**12


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
            assert admission.statistics() == AdmissionStatistics(in_flight=1, admitted=3, refused=1)

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
    assert admission.statistics() == AdmissionStatistics(in_flight=0, admitted=3, refused=0)


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
