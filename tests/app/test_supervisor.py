"""app.supervisor: all places together, from the start to the last burial."""

import os
from pathlib import Path

import pytest

from app.engine import Engine
from app.errors import NoWorkerReady
from tests.app.support import make_job, on_loop, ready_worker, serve_config


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
