"""The heartbeat and the age of the oldest step."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpu_workers.heart import Heart
from shm.link import ControlLink, WorkerLink, create_link
from shm.region import Backing


@pytest.fixture
def ends() -> Iterator[tuple[WorkerLink, ControlLink]]:
    with ExitStack() as undo:
        region = undo.enter_context(create_link(16, os.urandom(16), 0, 1, Backing.MEMFD))
        bell = os.eventfd(0)
        undo.callback(os.close, bell)
        yield WorkerLink(region, bell), ControlLink(region, bell)


def wait_for_beat(control: ControlLink) -> None:
    """Return after the next beat that begins after this call (the words have no bell)."""
    now_ns = time.monotonic_ns()
    while control.heartbeat_ns() <= now_ns:
        os.sched_yield()


def test_the_first_beat_comes_at_once(ends: tuple[WorkerLink, ControlLink]) -> None:
    worker, control = ends
    with Heart(worker):
        assert control.heartbeat_ns() > 0
        assert control.oldest_step_ns() == 0


def test_the_oldest_of_several_steps_is_told(ends: tuple[WorkerLink, ControlLink]) -> None:
    worker, control = ends
    with Heart(worker) as heart:
        before_ns = time.monotonic_ns()
        with heart.step():
            between_ns = time.monotonic_ns()
            with heart.step():
                wait_for_beat(control)
                assert before_ns <= control.oldest_step_ns() <= between_ns
        wait_for_beat(control)
        assert control.oldest_step_ns() == 0


def test_a_step_ends_also_when_its_work_fails(ends: tuple[WorkerLink, ControlLink]) -> None:
    worker, control = ends
    with Heart(worker) as heart:
        with pytest.raises(ValueError, match="broken"), heart.step():
            raise ValueError("broken")
        wait_for_beat(control)
        assert control.oldest_step_ns() == 0
