"""app.loop_monitor: how long the loop was held."""

import asyncio
import threading
import time

from app.loop_monitor import LoopMonitor
from tests.app.support import on_loop, until


def work_for(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@on_loop
async def test_a_callback_that_holds_the_loop_is_seen_with_its_own_work() -> None:
    with LoopMonitor() as monitor:
        asyncio.get_running_loop().call_soon(work_for, 0.05)
        await until(lambda: monitor.statistics().worst_lag_ms > 40)
        statistics = monitor.statistics()
        assert 40 < statistics.worst_cpu_ms <= statistics.worst_lag_ms
        assert statistics.recent_lag_ms == statistics.worst_lag_ms


@on_loop
async def test_a_callback_that_only_waits_is_lag_and_not_work() -> None:
    with LoopMonitor() as monitor:
        held = asyncio.Event()
        asyncio.get_running_loop().call_soon(lambda: (threading.Event().wait(0.05), held.set()))
        await held.wait()
        await until(lambda: monitor.statistics().worst_lag_ms > 40)
        assert monitor.statistics().worst_cpu_ms < 40
