"""The worker process as control sees it, with the stub tower."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpu_workers.families.stub import stub_rows
from shm.layout import (
    NO_BLOCK,
    BlockState,
    CompletionKind,
    Dtype,
    Submission,
    SubmissionKind,
    WorkerState,
)
from shm.messages import BlockMetadata, ItemRows
from tests.gpu_workers.harness import Harness, WorkerDied, worker_config

StartWorker = Callable[..., Harness]


def test_a_ready_worker_says_what_it_is(worker: Harness) -> None:
    info = worker.control.info()
    assert worker.control.state() is WorkerState.READY
    assert (info.model_type, info.dim, info.dtype, info.device) == ("stub", 256, "float32", "cpu")
    assert worker.control.heartbeat_ns() > 0


def test_the_stub_tower_loads_no_model_library(worker: Harness) -> None:
    mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "numpy" in mapped
    for library in ("libtorch", "tokenizers", "PIL"):
        assert library not in mapped


def test_an_item_ends_in_the_rows_that_its_bytes_determine(worker: Harness) -> None:
    end = worker.outcome(b"any bytes").end
    assert (end.kind, end.rows, end.dim, end.dtype) == (CompletionKind.READY, 16, 256, Dtype.FLOAT32)
    assert np.array_equal(worker.rows(end), stub_rows(b"any bytes"))
    assert worker.header(end).state == BlockState.READY


def test_items_of_a_request_keep_their_order_and_their_row_ranges(worker: Harness) -> None:
    items = [b"stub rows=3", b"plain", b"stub rows=1"]
    end = worker.outcome(*items, modality="audio").end
    assert np.array_equal(worker.rows(end), np.concatenate([stub_rows(item) for item in items]))
    assert worker.metadata(end) == BlockMetadata(
        "audio",
        [
            ItemRows(0, 3, [[1, 3, 1]], 1, 1),
            ItemRows(3, 16, [[1, 16, 1]], 1, 1),
            ItemRows(19, 1, [[1, 1, 1]], 1, 1),
        ],
    )


def test_sizes_are_known_while_the_block_is_still_being_filled(worker: Harness) -> None:
    ticket = worker.submit(b"stub rows=2 fault=hang-in-forward")
    shape = worker.shape_of(ticket)
    header = worker.header(shape)
    assert (header.state, header.rows, header.rows_ready) == (BlockState.FILLING, 2, 0)
    assert worker.metadata(shape).items[0].row_count == 2


def test_a_streamed_requests_shape_is_told_at_once_and_first(worker: Harness) -> None:
    outcome = worker.outcome(b"any bytes", streamed=True)
    assert outcome.shape_known is not None
    assert (outcome.shape_known.block, outcome.shape_known.rows) == (outcome.end.block, 16)


def test_a_shape_that_nobody_waits_for_is_no_record_of_its_own_when_the_rows_are_there(
    worker: Harness,
) -> None:
    told = [worker.outcome(b"quick %d" % number).shape_known for number in range(20)]
    assert None in told, "most end before the next look at the clock"


def test_rows_of_finished_items_are_readable_before_the_last_is_done(start_worker: StartWorker) -> None:
    worker = start_worker(max_batch_items=1)
    items = [b"stub rows=2 a", b"stub rows=3 b", b"stub fault=hang-in-forward"]
    shape = worker.shape_of(worker.submit(*items))
    header = worker.wait_header(shape, rows_ready=5)
    assert (header.state, header.rows_ready) == (BlockState.FILLING, 5)
    expected = np.concatenate([stub_rows(item) for item in items[:2]])
    assert np.array_equal(worker.rows(shape)[:5], expected)


def test_many_requests_at_once_each_get_their_own_rows(start_worker: StartWorker) -> None:
    worker = start_worker(preprocess_threads=3)
    items = {worker.submit(item): item for item in (b"request %d" % n for n in range(60))}
    for ticket, item in items.items():
        assert np.array_equal(worker.rows(worker.outcome_of(ticket).end), stub_rows(item))


def test_waiting_items_share_a_forward(worker: Harness) -> None:
    first = worker.submit(b"stub forward_ms=400")
    worker.shape_of(first)
    others = [worker.submit(b"item %d" % n) for n in range(8)]
    assert max(worker.outcome_of(ticket).end.batch_items for ticket in others) > 1


def test_a_reclaimed_block_is_used_again_under_a_new_generation(worker: Harness) -> None:
    first = worker.outcome(b"first").end
    worker.reclaim(first)
    second = worker.outcome(b"second").end
    assert (second.block, second.generation) == (first.block, first.generation + 1)
    assert np.array_equal(worker.rows(second), stub_rows(b"second"))


def test_a_stale_reclaim_changes_nothing(worker: Harness) -> None:
    first = worker.outcome(b"first").end
    worker.reclaim(first._replace(generation=first.generation + 1))
    worker.outcome(b"second")
    assert worker.header(first).state == BlockState.READY
    assert np.array_equal(worker.rows(first), stub_rows(b"first"))


@pytest.mark.parametrize("ending", ["sigterm", "drain"])
def test_a_worker_told_to_end_finishes_what_it_has(worker: Harness, ending: str) -> None:
    items = [b"stub forward_ms=50 %d" % n for n in range(12)]
    tickets = [worker.submit(item) for item in items]
    if ending == "drain":
        worker.say(Submission(SubmissionKind.DRAIN))
    else:
        worker.process.send_signal(signal.SIGTERM)
    for ticket, item in zip(tickets, items, strict=True):
        assert np.array_equal(worker.rows(worker.outcome_of(ticket).end), stub_rows(item))
    assert worker.wait_exit() == 0
    assert worker.control.state() is WorkerState.DRAINING


def test_an_interrupt_from_the_terminal_is_controls_affair(worker: Harness) -> None:
    worker.process.send_signal(signal.SIGINT)
    assert worker.outcome(b"still here").end.kind is CompletionKind.READY


def test_a_worker_whose_parent_is_gone_does_not_start(start_worker: StartWorker) -> None:
    worker = start_worker(parent_pid=os.getpid() + 1)
    assert worker.wait_exit() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tower": "auto", "checkpoint": "/nonexistent"}, "no such checkpoint"),
        ({"tower": "other"}, "unknown tower"),
        ({"faults": ["no-such-fault"]}, "unknown fault point"),
    ],
)
def test_a_configuration_that_can_never_work_ends_with_78(
    start_worker: StartWorker, changes: dict[str, object], reason: str
) -> None:
    worker = start_worker(**changes)
    assert worker.wait_exit() == 78
    assert worker.control.state() is WorkerState.FAILED
    assert reason in worker.control.failure()
    assert reason in worker.log[-1]
    assert "worker=3" in worker.log[-1]


def test_an_unsupported_model_type_is_named(start_worker: StartWorker, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    worker = start_worker(tower="auto", checkpoint=str(tmp_path))
    assert worker.wait_exit() == 78
    assert "'bert'" in worker.log[-1]


@pytest.mark.parametrize("argument", ["not json", "{}"])
def test_an_argument_that_is_no_configuration_ends_with_78(argument: str) -> None:
    command = [sys.executable, "-m", "gpu_workers", argument]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 78
    assert "not a WorkerConfig" in ended.stderr.splitlines()[-1]


def test_a_region_of_the_wrong_kind_ends_the_worker() -> None:
    config = worker_config(link_fd=0, arena_fd=0, segment_fd=0, completion_eventfd=0)
    command = [sys.executable, "-m", "gpu_workers", msgspec.json.encode(config).decode()]
    with Path("/dev/null").open("rb") as nothing:
        ended = subprocess.run(command, stdin=nothing, capture_output=True, text=True, check=False)
    assert ended.returncode == 70
    assert "RegionCorrupt" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "fault", ["exit-on-take", "exit-before-shape", "exit-in-forward", "exit-before-ready"]
)
def test_a_worker_can_be_made_to_die_before_its_answer(worker: Harness, fault: str) -> None:
    ticket = worker.submit(f"stub fault={fault}".encode())
    with pytest.raises(WorkerDied):
        worker.outcome_of(ticket)
    assert worker.wait_exit() == -signal.SIGKILL
    filling = worker.segment.header(0).state == BlockState.FILLING
    assert filling is (fault != "exit-on-take")


def test_a_worker_can_be_made_to_die_after_its_answer(worker: Harness) -> None:
    ticket = worker.submit(b"stub fault=exit-after-ready")
    assert worker.wait_exit() == -signal.SIGKILL
    assert worker.outcome_of(ticket).end.kind is CompletionKind.READY


def test_faults_of_the_configuration_strike_every_request(start_worker: StartWorker) -> None:
    worker = start_worker(faults=["error-in-decode"])
    assert worker.outcome(b"anything").end.kind is CompletionKind.FAILED


def test_a_hanging_forward_shows_as_an_old_step(worker: Harness) -> None:
    idle_ns = worker.control.oldest_step_ns()
    worker.shape_of(worker.submit(b"stub fault=hang-in-forward"))
    assert idle_ns == 0
    while worker.control.oldest_step_ns() == 0:  # the next beat is at most a quarter of a second away
        os.sched_yield()


def test_a_failed_ticket_without_a_block_names_none(worker: Harness) -> None:
    assert worker.outcome(b"").end.block == NO_BLOCK
