"""app.place: real processes that start, die and are replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from app.engine import Engine
from app.errors import NoWorkerReady
from app.jobs import Encoded
from app.place import BackOff
from gpu_workers.families.stub import stub_rows
from shm.client import connect
from shm.errors import WorkerLost
from tests.app.support import make_job, on_loop, ready_worker, serve_config, until


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


async def leave_dead_segments(engine: Engine, item: bytes, count: int) -> list[Encoded]:
    """Each with a leased block in it; the place's worker is dead at the end."""
    held = []
    for epoch in range(1, count + 1):
        await ready_worker(engine, epoch=epoch)
        held.append(await engine.encode(make_job(engine.arena, f"key {epoch}", item)))
        os.kill(engine.workers()[0].pid, signal.SIGKILL)
    return held


@on_loop
async def test_small_leases_in_dead_segments_keep_no_place_waiting(tmp_path: Path) -> None:
    config = serve_config(tmp_path, shm_backing="posix")
    async with Engine(config) as engine:
        held = await leave_dead_segments(engine, b"a picture", 5)
        await ready_worker(engine, epoch=6)
        assert [segment.epoch for segment in engine.statistics().segments] == [1, 2, 3, 4, 5, 6]
        with await asyncio.to_thread(connect, config.attach_socket) as session:
            for encoded in held:
                with await asyncio.to_thread(session.attach, encoded.handle) as view:
                    assert (view.numpy() == stub_rows(b"a picture")).all()
        await until(lambda: [segment.epoch for segment in engine.statistics().segments] == [6])


@on_loop
async def test_a_place_waits_while_leases_in_dead_segments_keep_more_than_a_segment(tmp_path: Path) -> None:
    config = serve_config(tmp_path, shm_backing="posix")
    async with Engine(config) as engine:
        held = await leave_dead_segments(engine, b"stub rows=10000", 2)
        await until(lambda: engine.workers()[0].state == "waiting")
        engine.release(held[0].handle.nonce)
        await ready_worker(engine, epoch=3)
        assert [segment.epoch for segment in engine.statistics().segments] == [2, 3]


@on_loop
async def test_a_waiting_place_names_the_readers_and_goes_on_when_they_release(tmp_path: Path) -> None:
    """The memory of a memfd cannot be given back in part: two dead segments are too many."""
    config = serve_config(tmp_path, shm_backing="memfd")
    async with Engine(config) as engine:
        held = await leave_dead_segments(engine, b"a picture", 2)
        with await asyncio.to_thread(connect, config.attach_socket) as session:
            view = await asyncio.to_thread(session.attach, held[1].handle)
            await until(lambda: engine.workers()[0].state == "waiting")
            engine.release(held[0].handle.nonce)
            await ready_worker(engine, epoch=3)
            again = await engine.encode(make_job(engine.arena, "key", b"another"))
            other_view = await asyncio.to_thread(session.attach, again.handle)
            os.kill(engine.workers()[0].pid, signal.SIGKILL)
            await until(lambda: engine.workers()[0].state == "waiting")
            reason = engine.workers()[0].reason
            assert f"pid {os.getpid()}" in reason
            assert "killed by SIGKILL" in reason
            with pytest.raises(NoWorkerReady):
                await engine.encode(make_job(engine.arena, "key 3", b"a picture"))
            view.release()
            assert (await ready_worker(engine, epoch=4)).reason == "killed by SIGKILL"
            other_view.release()
