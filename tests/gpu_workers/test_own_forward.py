"""Forwards that fail on one rank of a group that shares weights, or on all: with two real ranks."""

from collections.abc import Callable

import pytest

from gpu_workers.errors import RanksDisagree
from gpu_workers.own_forward import OwnForward
from gpu_workers.threads import EXIT_SOFTWARE
from shm.errors import ErrorCode
from shm.layout import CompletionKind
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import Harness, WorkerDied
from tests.gpu_workers.reference import picture, png

FAULT = ["error-in-forward"]
PICTURE = bytes(png(picture(56, 56)))


def group_of_two(
    start_worker: Callable[..., Harness], checkpoints: TinyCheckpoints, here: list[str], there: list[str]
) -> Harness:
    return start_worker(
        tower="auto",
        checkpoint=str(checkpoints["qwen2_vl"]),
        tp_mode="weights",
        faults=here,
        other_rank={"faults": there},
    )


def test_a_forward_that_fails_on_rank_0_alone_ends_the_rank_that_stands_still(
    start_worker: Callable[..., Harness], tiny_checkpoints: TinyCheckpoints
) -> None:
    group = group_of_two(start_worker, tiny_checkpoints, FAULT, [])
    group.submit(PICTURE)
    assert group.other_process.wait() == EXIT_SOFTWARE


def test_a_forward_that_fails_on_another_rank_alone_ends_rank_0_which_stands_still(
    start_worker: Callable[..., Harness], tiny_checkpoints: TinyCheckpoints
) -> None:
    group = group_of_two(start_worker, tiny_checkpoints, [], FAULT)
    with pytest.raises(WorkerDied):
        group.outcome(PICTURE)
    assert group.wait_exit() == EXIT_SOFTWARE
    assert any("failed on another rank alone" in line for line in group.log)


def test_a_forward_that_fails_alike_on_all_ranks_and_a_bad_picture_end_no_group(
    start_worker: Callable[..., Harness], tiny_checkpoints: TinyCheckpoints
) -> None:
    group = group_of_two(start_worker, tiny_checkpoints, FAULT, FAULT)
    for _ in range(2):
        end = group.outcome(PICTURE).end
        assert (end.kind, end.error) == (CompletionKind.FAILED, ErrorCode.FORWARD_FAILED)
        bad = group.outcome(PICTURE[:-40]).end
        assert bad.kind is CompletionKind.FAILED
        assert bad.error != ErrorCode.INTERNAL
    assert group.process.poll() is None
    assert group.other_process.poll() is None


def test_a_rank_that_entered_as_many_collectives_waits_for_its_own_end() -> None:
    entered = 7
    own = OwnForward(lambda: entered)
    with own.of(1):
        entered += 2
        with pytest.raises(RanksDisagree, match="batch 1"):
            own.watch(1, collectives=1)
    assert own.collectives() == 2
    own.watch(1, collectives=0)
