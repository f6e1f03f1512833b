"""app.engine: from a job to a leased block, and everything back afterwards."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from app.engine import Engine
from app.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    EncodeFault,
    InvalidItem,
    ItemUndecodable,
    MemoryFull,
    PoisonInput,
    RequestError,
    WorkerLost,
)
from app.jobs import Encoded
from gpu_workers.families.stub import stub_rows
from shm.client import Session, connect
from shm.layout import BlockState
from tests.app.support import make_job, on_loop, serve_config, until


@asynccontextmanager
async def running(directory: Path, **changes: object) -> AsyncIterator[tuple[Engine, Session]]:
    """An engine with a reader; at the end everything that was borrowed must have come back."""
    config = serve_config(directory, **changes)
    async with Engine(config) as engine:
        await until(lambda: {status.state for status in engine.workers()} == {"ready"})
        with await asyncio.to_thread(connect, config.attach_socket) as session:
            yield engine, session
        await all_is_back(engine)


async def all_is_back(engine: Engine) -> None:
    """No flight, lease, session, input page or block is left, in control's books and in the segments."""
    await until(lambda: engine.statistics().inflight.flights == 0)
    await until(lambda: engine.statistics().sessions.sessions == 0)
    await until(lambda: all(segment.blocks == 0 for segment in engine.statistics().segments))
    await until(lambda: "ready" in {status.state for status in engine.workers()})
    statistics = engine.statistics()
    assert statistics.arena.free_bytes == statistics.arena.total_bytes
    assert (statistics.leases.attached, statistics.leases.unattached) == (0, 0)
    await until(lambda: block_states(engine) == {BlockState.FREE})


def block_states(engine: Engine) -> set[int]:
    """The states in the block tables of all living workers' segments, as the workers have written them."""
    segments = [segment for segment in engine.segments() if segment.outbox is not None]
    readers = [segment.reader for segment in segments]
    return {reader.header(block).state for reader in readers for block in range(reader.block_count)}


async def check_rows(session: Session, encoded: Encoded, *items: bytes) -> None:
    """Attach, wait for the rows, compare them with the stub tower's, release."""
    with await asyncio.to_thread(session.attach, encoded.handle) as view:
        await asyncio.to_thread(view.wait_ready, 30)
        assert (view.numpy() == np.concatenate([stub_rows(item) for item in items])).all()
        view.check()


@on_loop
async def test_an_encode_ends_in_rows_that_another_process_can_map(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        encoded = await engine.encode(make_job(engine.arena, "key", b"stub rows=3", b"second"))
        assert [(item.row_start, item.row_count) for item in encoded.metadata.items] == [(0, 3), (3, 16)]
        assert (encoded.state, encoded.attempt, encoded.worker) == ("ready", 1, 0)
        await check_rows(session, encoded, b"stub rows=3", b"second")


@on_loop
async def test_two_hundred_at_once_on_two_workers_are_two_hundred_right_answers(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as (engine, session):
        items = [b"picture %d" % number for number in range(200)]
        jobs = [make_job(engine.arena, f"key {number}", item) for number, item in enumerate(items)]
        answers = await asyncio.gather(*map(engine.encode, jobs))
        assert {encoded.worker for encoded in answers} == {0, 1}
        for encoded, item in zip(answers, items, strict=True):
            await check_rows(session, encoded, item)


@on_loop
async def test_the_shape_comes_before_the_forward_and_the_rows_follow(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        item = b"stub rows=5 forward_ms=50"
        encoded = await engine.encode(make_job(engine.arena, "key", item, wait="shape"))
        assert (encoded.state, encoded.rows) == ("shape", 5)
        await check_rows(session, encoded, item)


@on_loop
async def test_the_same_request_twice_is_encoded_once_and_leased_twice(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        item = b"stub forward_ms=50"
        jobs = [make_job(engine.arena, "key", item) for _ in range(2)]
        first, second = await asyncio.gather(*map(engine.encode, jobs))
        assert (first.handle.block, first.handle.generation) == (
            second.handle.block,
            second.handle.generation,
        )
        assert first.handle.nonce != second.handle.nonce
        assert engine.statistics().dispatch.dispatched == 1
        for encoded in (first, second):
            await check_rows(session, encoded, item)


@on_loop
async def test_the_same_key_with_other_media_is_refused_and_frees_its_input(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        item = b"stub forward_ms=50"
        first = asyncio.create_task(engine.encode(make_job(engine.arena, "key", item)))
        await until(lambda: engine.statistics().inflight.flights == 1)
        with pytest.raises(DuplicateRequest):
            await engine.encode(make_job(engine.arena, "key", b"other"))
        await check_rows(session, await first, item)


@on_loop
async def test_a_deadline_ends_the_wait_and_the_work(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _):
        busy = asyncio.create_task(engine.encode(make_job(engine.arena, "busy", b"stub forward_ms=300")))
        await until(lambda: engine.workers()[0].in_flight == 1)
        with pytest.raises(DeadlinePassed):
            await engine.encode(make_job(engine.arena, "late", b"stub forward_ms=1", seconds=0.05))
        engine.release((await busy).handle.nonce)


@on_loop
async def test_a_cancelled_encode_gives_everything_back(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _):
        for wait in ("ready", "shape"):
            job = make_job(engine.arena, "key", b"stub forward_ms=100", wait=wait)
            encode = asyncio.create_task(engine.encode(job))
            await until(lambda: engine.workers()[0].in_flight == 1)
            encode.cancel()
            await asyncio.wait([encode])
            assert encode.cancelled()
            await until(lambda: engine.statistics().inflight.flights == 0)


@on_loop
async def test_releasing_the_only_handle_of_a_filling_block_cancels_the_work(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        job = make_job(engine.arena, "key", b"stub forward_ms=100", wait="shape")
        encoded = await engine.encode(job)
        assert engine.release(encoded.handle.nonce)
        again = await engine.encode(make_job(engine.arena, "key", b"another"))
        await check_rows(session, again, b"another")


@pytest.mark.parametrize(
    ("item", "error"),
    [(b"", InvalidItem), (b"stub rows=none", ItemUndecodable), (b"stub fault=error-in-forward", EncodeFault)],
)
@on_loop
async def test_a_bad_item_fails_alone(tmp_path: Path, item: bytes, error: type[RequestError]) -> None:
    async with running(tmp_path) as (engine, session):
        good = make_job(engine.arena, "good", b"good")
        bad = make_job(engine.arena, "bad", item)
        answer, failure = await asyncio.gather(*map(engine.encode, (good, bad)), return_exceptions=True)
        assert isinstance(failure, error)
        assert isinstance(answer, Encoded)
        await check_rows(session, answer, b"good")


FAULTS = ["exit-on-take", "exit-before-shape", "exit-in-forward", "exit-before-ready"]


@pytest.mark.parametrize("fault", FAULTS)
@on_loop
async def test_a_request_that_kills_two_workers_ends_and_the_engine_goes_on(
    tmp_path: Path, fault: str
) -> None:
    async with running(tmp_path) as (engine, session):
        with pytest.raises(PoisonInput):
            await engine.encode(make_job(engine.arena, "poison", b"stub fault=" + fault.encode()))
        encoded = await engine.encode(make_job(engine.arena, "good", b"good"))
        await check_rows(session, encoded, b"good")
        assert engine.statistics().restarts == 2


@on_loop
async def test_a_worker_that_dies_after_ready_has_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        item = b"stub fault=exit-after-ready"
        encoded = await engine.encode(make_job(engine.arena, "key", item))
        assert encoded.attempt == 1
        await check_rows(session, encoded, item)


@on_loop
async def test_every_request_ends_once_while_workers_are_killed(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as (engine, session):
        stop = asyncio.Event()
        ended = []

        async def client(name: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                item = b"stub rows=%d forward_ms=1 %d %d" % (random.randint(1, 300), name, number)
                try:
                    encoded = await engine.encode(make_job(engine.arena, f"{name} {number}", item))
                except (WorkerLost, PoisonInput):  # two kills hit it, the second while it was alone
                    ended.append("lost")
                else:
                    await check_rows(session, encoded, item)
                    ended.append("right")

        clients = [asyncio.create_task(client(name)) for name in range(4)]
        for kill in range(1, 7):
            answered = len(ended)
            await until(
                lambda before=answered: len(ended) > before + 3 or any(map(asyncio.Task.done, clients))
            )
            os.kill(random.choice([w.pid for w in engine.workers() if w.state == "ready"]), signal.SIGKILL)
            await until(lambda kills=kill: engine.statistics().restarts == kills and engine.ready())
        stop.set()
        await asyncio.gather(*clients)
        assert set(ended) <= {"right", "lost"}


@on_loop
async def test_a_drain_waits_for_the_work_under_way_and_takes_no_more(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        item = b"stub forward_ms=100"
        encode = asyncio.create_task(engine.encode(make_job(engine.arena, "key", item)))
        await until(lambda: engine.workers()[0].in_flight == 1)
        drain = asyncio.create_task(engine.drain(5.0))
        await until(lambda: not engine.ready())
        with pytest.raises(Draining):
            await engine.encode(make_job(engine.arena, "late", b"late"))
        await check_rows(session, await encode, item)
        await drain


@on_loop
async def test_what_is_not_done_when_the_drain_ends_gets_an_answer_too(tmp_path: Path) -> None:
    async with Engine(serve_config(tmp_path, shutdown_timeout_s=0.05)) as engine:
        await until(engine.ready)
        job = make_job(engine.arena, "key", b"stub forward_ms=60000")
        encode = asyncio.create_task(engine.encode(job))
        await until(lambda: engine.workers()[0].in_flight == 1)
        await engine.drain(0.0)
        with pytest.raises(Draining):
            await encode


@on_loop
async def test_rows_of_a_request_of_many_items_are_readable_before_the_last_is_encoded(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, preprocess_threads=1) as (engine, session):
        items = [b"stub rows=4 forward_ms=20 number=%d" % number for number in range(16)]
        encoded = await engine.encode(make_job(engine.arena, "key", *items, wait="shape"))
        assert (encoded.state, encoded.rows) == ("shape", 64)

        def read() -> list[int]:
            """The rows that were there at each look, each look's rows compared with what is right."""
            seen = []
            with session.attach(encoded.handle) as view:
                right = np.concatenate([stub_rows(item) for item in items])
                while not seen or seen[-1] < view.rows:
                    view.wait_rows((seen[-1] if seen else 0) + 1, 30)
                    seen.append(view.rows_ready)
                    assert (view.numpy()[: seen[-1]] == right[: seen[-1]]).all()
                view.check()
            return seen

        seen = await asyncio.to_thread(read)
        assert seen[0] < 64
        assert all(rows % 4 == 0 for rows in seen)


@on_loop
async def test_a_stuck_workers_request_is_answered_by_another_and_its_late_block_goes_back(
    tmp_path: Path,
) -> None:
    settings = {"workers": 2, "stall_timeout_s": 30.0, "stuck_share": 0.02, "heartbeat_s": 0.1}
    async with running(tmp_path, **settings) as (engine, session):
        stuck_pid = engine.workers()[0].pid
        os.kill(stuck_pid, signal.SIGSTOP)
        try:
            item = b"anything"
            encoded = await engine.encode(make_job(engine.arena, "key", item))
            assert (encoded.worker, encoded.attempt) == (1, 2)
            assert engine.statistics().dispatch.rescued == 1
            assert engine.statistics().inflight.flights == 1
            await check_rows(session, encoded, item)
        finally:
            os.kill(stuck_pid, signal.SIGCONT)
        await until(lambda: engine.statistics().inflight.flights == 0)
        assert engine.workers()[0].pid == stuck_pid


@on_loop
async def test_a_segment_full_of_leased_blocks_refuses_at_admission_until_one_is_released(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, segment_bytes=1 << 20) as (engine, session):
        held = []
        number = 0
        while True:
            try:
                engine.check_room(4096)
            except MemoryFull:
                break
            number += 1
            item = b"stub rows=100 %d" % number
            held.append((await engine.encode(make_job(engine.arena, f"key {number}", item)), item))
        assert len(held) > 4
        engine.release(held.pop()[0].handle.nonce)
        engine.check_room(4096)
        for encoded, item in held:
            await check_rows(session, encoded, item)


@on_loop
async def test_poison_is_refused_to_whoever_brings_it_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, session):
        poison = b"stub fault=exit-in-forward"
        with pytest.raises(PoisonInput):
            await engine.encode(make_job(engine.arena, "first", poison))
        with pytest.raises(PoisonInput):
            await engine.encode(make_job(engine.arena, "again", poison))
        await until(engine.ready)
        await check_rows(session, await engine.encode(make_job(engine.arena, "good", b"good")), b"good")
        assert engine.statistics().restarts == 2
