"""Daemons that tests share, each started once, and stopped with checks at the end (Daemon.stop)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.client import Session, connect
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.pictures import write_pictures

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CASES_VARIABLE = "ENCODERD_CASES"  # where shared/cases lies, if not beside the checkout
SMALL_MEMORY = ("--segment-size", "64MiB", "--arena-size", "160MiB")
STUB = ("--tower", "stub", *SMALL_MEMORY)

_MAKE_CHECKPOINTS = """
import sys
from pathlib import Path
from gpu_workers.checkpoints import make_checkpoint
for family in sys.argv[2:]:
    make_checkpoint(family, Path(sys.argv[1]) / family, size="tiny", seed=0)
"""


def make_checkpoints(directory: Path, *families: str) -> None:
    """One below directory for each family, all made in one process: imports take the time."""
    subprocess.run(
        [sys.executable, "-c", _MAKE_CHECKPOINTS, str(directory), *families],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random-weight checkpoint of every family."""
    directory = tmp_path_factory.mktemp("checkpoints")
    make_checkpoints(directory, *FAMILIES)
    return {family: directory / family for family in FAMILIES}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Picture files of several sizes and formats."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def media_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory below which the qwen daemon may read local files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def qwen(checkpoints: dict[str, Path], media_root: Path) -> Iterator[Daemon]:
    """Two real workers with a tiny Qwen2-VL tower in float32, and everything that media may come from."""
    media = ("--allow-private-media", "--allowed-local-media-path", str(media_root))
    # The case runner attaches nothing: what it leaves goes back when the handles' time is over.
    options = ("--dtype", "float32", "--lease-timeout", "10", *media)
    with Daemon(str(checkpoints["qwen2_vl"]), *SMALL_MEMORY, *options) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def omni_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Omni: pictures, video and sound."""
    checkpoint = tmp_path_factory.mktemp("omni") / "qwen2_5_omni"
    command = [sys.executable, "-m", "gpu_workers.checkpoints", "qwen2_5_omni", str(checkpoint)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return checkpoint


@pytest.fixture(scope="session")
def omni(omni_checkpoint: Path, media_root: Path) -> Iterator[Daemon]:
    """One worker with every modality, at most eight frames of a video, and the device's preprocessing."""
    options = ("--mm-process-config", '{"vision_config": {"video": {"max_frames": 8}}}')
    media = ("--allow-private-media", "--allowed-local-media-path", str(media_root))
    more = ("--preprocess-device", "device", "--lease-timeout", "10", *media)
    with Daemon(str(omni_checkpoint), *SMALL_MEMORY, *options, *more, workers=1) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two stub workers with the default time-outs."""
    with Daemon(str(tmp_path_factory.mktemp("stub")), *STUB) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def hasty_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two stub workers, with a short stall limit and a short life for handles that nobody attaches."""
    options = (*STUB, "--stall-timeout", "2", "--lease-timeout", "1")
    with Daemon(str(tmp_path_factory.mktemp("hasty")), *options) as daemon:
        yield daemon


@pytest.fixture
def stub_session(stub: Daemon) -> Iterator[Session]:
    with connect(stub.attach_socket) as session:
        yield session


@pytest.fixture
def qwen_session(qwen: Daemon) -> Iterator[Session]:
    with connect(qwen.attach_socket) as session:
        yield session


@pytest.fixture(scope="session")
def cases_directory() -> Path:
    """The public test cases beside the checkout."""
    given = os.environ.get(CASES_VARIABLE)
    directory = Path(given) if given else REPOSITORY.parent / "shared" / "cases"
    if not (directory / "run_cases.py").is_file():
        pytest.skip(f"no public cases at {directory}; set {CASES_VARIABLE} to the directory of run_cases.py")
    return directory
