"""Fixtures of the worker's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_workers.harness import Harness

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


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
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every family."""
    from gpu_workers.checkpoints import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(family, root / family, "tiny", seed=11)
    return {family: root / family for family in FAMILIES}
