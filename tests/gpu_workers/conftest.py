"""Fixtures of the worker's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu_workers.harness import Harness

if TYPE_CHECKING:  # a test run without real families loads no torch
    from gpu_workers.families.base import Family

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OMNI_FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
VISION_FAMILIES = (*FAMILIES, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *OMNI_FAMILIES)
SOUND_FAMILIES = ("qwen2_audio", "qwen3_asr", "glmasr", *OMNI_FAMILIES)


class TinyCheckpoints:
    """A tiny checkpoint of any family, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, family: str) -> Path:
        from gpu_workers.checkpoints import make_checkpoint

        directory = self._root / family
        if not directory.exists():
            make_checkpoint(family, directory, "tiny", seed=11)
        return directory


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Harness]]:
    """Starts stub workers (or others, by their configuration); they end with the test."""
    with ExitStack() as undo:

        def start(**changes: Any) -> Harness:
            return undo.enter_context(Harness(**changes))

        yield start


@pytest.fixture
def worker(start_worker: Callable[..., Harness]) -> Harness:
    """One stub worker with the defaults."""
    return start_worker()


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """A tiny checkpoint of every family."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def checkpoint(family_name: str, tiny_checkpoints: TinyCheckpoints) -> Path:
    """Of the family that the test file names by its fixture family_name."""
    return tiny_checkpoints[family_name]


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> "Family":
    """What a worker loads of it, in this process."""
    from tests.gpu_workers.reference import load_family

    return load_family(checkpoint)
