"""app.worker: what control makes of a process, and when it is condemned."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from app.engine import Engine
from app.worker import WorkerCondition
from shm.layout import LINK_HEARTBEAT_OFFSET, LINK_OLDEST_STEP_OFFSET, LINK_STATE_OFFSET, WorkerState
from tests.app.support import hand_workers, make_job, on_loop, ready_worker, serve_config, until


@on_loop
async def test_a_stopped_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path, stall_timeout_s=1.5)) as engine:
        first = await ready_worker(engine)
        os.kill(first.pid, signal.SIGSTOP)
        second = await ready_worker(engine, epoch=2)
        assert second.reason == "its heartbeat stopped"


@on_loop
async def test_a_worker_that_hangs_in_one_step_is_killed_and_replaced(tmp_path: Path) -> None:
    config = serve_config(tmp_path, workers=1, stall_timeout_s=1.5)
    async with Engine(config) as engine:
        await ready_worker(engine)
        job = make_job(engine.arena, "key", b"stub forward_ms=2500")
        encode = asyncio.create_task(engine.encode(job))
        await until(lambda: engine.workers()[0].reason == "one step of its work does not end")
        encode.cancel()
        await asyncio.wait([encode])
        await ready_worker(engine, epoch=2)


@on_loop
async def test_a_start_that_takes_too_long_is_condemned() -> None:
    async with hand_workers() as (_, [hand]):
        hand.worker.condition = WorkerCondition.LOADING
        hand.worker.check_progress(stall_ns=1, slow_ns=1, start_limit_ns=10**15)
        assert hand.worker.condition is WorkerCondition.LOADING
        hand.worker.check_progress(stall_ns=1, slow_ns=1, start_limit_ns=0)
        assert await hand.worker.ended == -signal.SIGKILL
        assert hand.worker.reason == "it did not become ready in time"


@on_loop
async def test_a_state_that_is_none_condemns_the_worker() -> None:
    async with hand_workers() as (_, [hand]):
        hand.store_link_word(LINK_STATE_OFFSET, 77)
        assert hand.worker.observe()
        assert await hand.worker.ended == -signal.SIGKILL
        assert not hand.worker.is_trusted


@pytest.mark.parametrize("word", [LINK_HEARTBEAT_OFFSET, LINK_OLDEST_STEP_OFFSET])
@on_loop
async def test_a_word_from_the_future_condemns_the_worker(word: int) -> None:
    async with hand_workers() as (_, [hand]):
        hand.store_link_word(word, time.monotonic_ns() + 10**15)
        hand.worker.check_progress(stall_ns=10**12, slow_ns=10**12, start_limit_ns=10**15)
        assert await hand.worker.ended == -signal.SIGKILL
        assert hand.worker.reason == "its heartbeat is from the future"


@on_loop
async def test_a_draining_worker_is_given_no_work() -> None:
    async with hand_workers() as (_, [hand]):
        assert hand.worker.can_take_work
        hand.link.set_state(WorkerState.DRAINING)
        assert hand.worker.observe()
        assert not hand.worker.can_take_work
