"""app.launch: what a worker is told, and that nothing is left behind when it cannot be started."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from app.launch import Launcher
from shm.errors import RegionUnavailable
from shm.region import Backing
from tests.app.support import BOOT_ID, serve_config


def test_a_process_is_started_and_told_its_place_and_epoch(tmp_path: Path) -> None:
    arena_fd = os.memfd_create("arena")
    launcher = Launcher(serve_config(tmp_path), BOOT_ID, Backing.MEMFD, arena_fd)
    regions = launcher.create_regions(place=3, epoch=7)
    [(process, pidfd)] = launcher.spawn(regions)
    assert process.args[:3] == [sys.executable, "-m", "gpu_workers"]
    assert '"index":3,"epoch":7' in process.args[3]
    assert process.wait() != 0  # the arena it was given is no region
    os.close(pidfd)
    os.close(arena_fd)
    regions.close()


def test_a_worker_keeps_its_heap_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "4096")
    with Path("/dev/null").open() as nothing:
        launcher = Launcher(serve_config(tmp_path), BOOT_ID, Backing.MEMFD, nothing.fileno())
        regions = launcher.create_regions(place=0, epoch=1)
        [(process, pidfd)] = launcher.spawn(regions)
        given = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        process.wait()
        os.close(pidfd)
        regions.close()
    assert f"MALLOC_TRIM_THRESHOLD_={1 << 30}".encode() in given
    assert b"MALLOC_TOP_PAD_=4096" in given


def test_memory_that_cannot_be_had_leaves_nothing_behind(tmp_path: Path) -> None:
    launcher = Launcher(serve_config(tmp_path, segment_bytes=1 << 50), BOOT_ID, Backing.MEMFD, -1)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RegionUnavailable, match="wanted"):
        launcher.create_regions(place=0, epoch=1)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("cuda", "cuda:5")])
def test_each_place_has_its_device(tmp_path: Path, device: str, expected: str) -> None:
    config = serve_config(tmp_path, device=device, base_gpu_id=2)
    with Path("/dev/null").open() as nothing:
        launcher = Launcher(config, BOOT_ID, Backing.MEMFD, nothing.fileno())
        regions = launcher.create_regions(place=3, epoch=1)
        assert launcher.worker_config(regions).device == expected
        regions.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"device": "cpu"}, 4096), ({"device": "cuda"}, 16384), ({"device": "cpu", "max_batch_patches": 7}, 7)],
)
def test_a_worker_is_told_what_its_device_takes_in_one_batch(
    tmp_path: Path, changes: dict[str, Any], expected: int
) -> None:
    with Path("/dev/null").open() as nothing:
        launcher = Launcher(serve_config(tmp_path, **changes), BOOT_ID, Backing.MEMFD, nothing.fileno())
        regions = launcher.create_regions(place=0, epoch=1)
        assert launcher.worker_config(regions).max_batch_patches == expected
        regions.close()


@pytest.mark.parametrize("where", ["auto", "cpu", "device"])
def test_a_worker_is_told_where_to_preprocess(tmp_path: Path, where: str) -> None:
    with Path("/dev/null").open() as nothing:
        launcher = Launcher(
            serve_config(tmp_path, preprocess_device=where), BOOT_ID, Backing.MEMFD, nothing.fileno()
        )
        regions = launcher.create_regions(place=0, epoch=1)
        assert launcher.worker_config(regions).preprocess_device == where
        regions.close()


def test_every_rank_of_every_place_has_its_device_and_rank_0_alone_the_link(tmp_path: Path) -> None:
    config = serve_config(tmp_path, device="cuda", base_gpu_id=1, tp_size=2, tp_mode="data")
    with Path("/dev/null").open() as nothing:
        launcher = Launcher(config, BOOT_ID, Backing.MEMFD, nothing.fileno())
        regions = launcher.create_regions(place=3, epoch=1)
        first, second = (launcher.worker_config(regions, rank) for rank in range(2))
        assert (first.device, second.device) == ("cuda:7", "cuda:8")
        assert (first.link_fd, second.link_fd) == (regions.link.fd, -1)
        assert regions.group is not None
        for rank, told in enumerate((first, second)):
            assert (told.rank, told.world_size, told.tp_mode) == (rank, 2, "data")
            assert (told.group_fd, told.store_fd) == (regions.group.fd, regions.store_fd)
            assert told.segment_fd == regions.segment.fd
        regions.close()
