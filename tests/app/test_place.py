"""app.place, app.supervisor and app.worker: real processes that start, die, hang and are replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from app.engine import Engine
from app.errors import NoWorkerReady
from app.place import BackOff, WorkerStatus
from gpu_workers.families.stub import stub_rows
from shm.client import connect
from shm.errors import WorkerLost
from tests.app.support import make_job, on_loop, serve_config, until


def is_ready(engine: Engine, place: int, epoch: int) -> bool:
    status = engine.workers()[place]
    return (status.state, status.epoch) == ("ready", epoch)


async def ready_worker(engine: Engine, place: int = 0, epoch: int = 1) -> WorkerStatus:
    await until(lambda: is_ready(engine, place, epoch))
    return engine.workers()[place]


def test_the_back_off_grows_to_ten_seconds_and_health_resets_it() -> None:
    back_off = BackOff()
    delays = [back_off.next_delay_s(was_healthy=False) for _ in range(10)]
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert back_off.next_delay_s(was_healthy=True) == 0.0
    assert back_off.next_delay_s(was_healthy=False) == 0.1


@on_loop
async def test_the_engine_starts_without_waiting_for_its_workers(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path, workers=2)) as engine:
        assert not engine.ready()
        assert {status.state for status in engine.workers()} == {"starting"}
        for place in range(2):
            status = await ready_worker(engine, place)
            assert (status.info.model_type, status.info.dim) == ("stub", 256)
        assert engine.ready()


@on_loop
async def test_a_killed_worker_is_replaced_under_the_next_epoch(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path)) as engine:
        first = await ready_worker(engine)
        os.kill(first.pid, signal.SIGKILL)
        second = await ready_worker(engine, epoch=2)
        assert second.pid != first.pid
        assert (second.restarts, second.reason) == (1, "killed by SIGKILL")
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        assert encoded.handle.epoch == 2
        assert [segment.epoch for segment in engine.statistics().segments] == [2]


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
async def test_handles_into_a_dead_workers_segment_stay_readable_until_released(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        os.kill(engine.workers()[0].pid, signal.SIGKILL)
        await ready_worker(engine, epoch=2)
        assert [segment.epoch for segment in engine.statistics().segments] == [1, 2]
        with await asyncio.to_thread(connect, config.attach_socket) as session:
            view = await asyncio.to_thread(session.attach, encoded.handle)
            assert (view.numpy() == stub_rows(b"a picture")).all()
            view.release()
            await until(lambda: [segment.epoch for segment in engine.statistics().segments] == [2])


@on_loop
async def test_a_reader_that_waits_for_rows_learns_that_the_worker_died(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        job = make_job(engine.arena, "key", b"stub forward_ms=60000", wait="shape")
        encoded = await engine.encode(job)
        with await asyncio.to_thread(connect, config.attach_socket) as session:
            view = await asyncio.to_thread(session.attach, encoded.handle)
            waiting = asyncio.create_task(asyncio.to_thread(view.wait_ready, 30))
            os.kill(engine.workers()[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await waiting
            view.release()
        assert engine.statistics().inflight.flights == 0


@on_loop
async def test_a_place_waits_while_readers_hold_two_dead_segments(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path)) as engine:
        held = []
        for epoch in (1, 2):
            await ready_worker(engine, epoch=epoch)
            held.append(await engine.encode(make_job(engine.arena, f"key {epoch}", b"a picture")))
            os.kill(engine.workers()[0].pid, signal.SIGKILL)
        await until(lambda: engine.workers()[0].state == "waiting")
        with pytest.raises(NoWorkerReady):
            await engine.encode(make_job(engine.arena, "key 3", b"a picture"))
        engine.release(held[0].handle.nonce)
        await ready_worker(engine, epoch=3)
        assert [segment.epoch for segment in engine.statistics().segments] == [2, 3]


@on_loop
async def test_a_checkpoint_that_can_never_load_is_not_tried_again(tmp_path: Path) -> None:
    config = serve_config(tmp_path, tower="auto", checkpoint=str(tmp_path / "missing"), workers=2)
    async with Engine(config) as engine:
        reason = await engine.failed()
        assert "missing" in reason or "checkpoint" in reason
        assert [(status.state, status.restarts) for status in engine.workers()] == [("failed", 0)] * 2
        with pytest.raises(NoWorkerReady):
            await engine.encode(make_job(engine.arena, "key", b"a picture"))


@on_loop
async def test_a_segment_that_does_not_fit_is_a_configuration_error(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path, segment_bytes=1 << 50, shm_backing="memfd")) as engine:
        assert "wanted" in await engine.failed()


@on_loop
async def test_workers_end_when_the_engine_does(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path, workers=2)) as engine:
        pids = [(await ready_worker(engine, place)).pid for place in range(2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@on_loop
async def test_an_engine_that_stops_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    async with Engine(serve_config(tmp_path, workers=2)):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors
