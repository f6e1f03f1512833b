"""Fixtures of the worker's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_workers.harness import Harness

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
