"""The meeting point of the threads: who waits, who goes, and when a ticket ends."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from gpu_workers.backlog import Backlog, BatchLimits, EncodeResult
from gpu_workers.errors import CompletionRingFull, ItemError
from gpu_workers.families.base import ItemPlan, Prepared
from gpu_workers.faults import Faults
from gpu_workers.jobs import Item, Job
from gpu_workers.publish import Publisher
from shm.errors import ErrorCode
from shm.layout import BlockState, Completion, CompletionKind, Dtype
from shm.link import ControlLink, WorkerLink, create_link
from shm.region import Backing
from shm.segment import SegmentReader, SegmentWriter, create_segment

DIM = 8
FAR_NS = 1 << 62


@dataclass
class Bench:
    """A backlog on real regions, and control's end of them."""

    publisher: Publisher
    writer: SegmentWriter
    reader: SegmentReader
    control: ControlLink

    def backlog(self, max_items: int = 8, max_patches: int = 100) -> Backlog:
        return Backlog(self.publisher, BatchLimits(max_items, max_patches))

    def job(self, ticket: int, *patches: int, deadline_ns: int = FAR_NS) -> Job:
        """A job with one item of one row for each number of patches."""
        job = Job(ticket, deadline_ns, "image")
        for cost in patches:
            job.add_item(memoryview(b"x"), ItemPlan(1, [[1, 1, 1]], 1, 1, cost))
        job.block = self.writer.allocate(job.rows * DIM * 4, job.rows, DIM, Dtype.FLOAT32, b"")
        return job

    def records(self) -> list[Completion]:
        taken = iter(self.control.completions.try_take, None)
        return [Completion.unpack(raw) for raw in taken]

    def block_state(self, job: Job) -> BlockState:
        assert job.block is not None
        return BlockState(self.reader.header(job.block.block).state)


@pytest.fixture
def bench() -> Iterator[Bench]:
    boot_id = os.urandom(16)
    with ExitStack() as undo:
        link = undo.enter_context(create_link(16, boot_id, 0, 1, Backing.MEMFD))
        segment = undo.enter_context(
            create_segment(1 << 20, boot_id=boot_id, place=0, epoch=1, backing=Backing.MEMFD)
        )
        bell = os.eventfd(0)
        undo.callback(os.close, bell)
        yield Bench(
            Publisher(WorkerLink(link, bell), Faults([])),
            SegmentWriter(segment),
            SegmentReader(segment),
            ControlLink(link, bell),
        )


def prepare(backlog: Backlog) -> Item:
    """Take the next item and bring it back prepared."""
    item = backlog.take_to_prepare()
    assert item is not None
    backlog.bring_prepared(item, Prepared("image", item.plan), 1)
    return item


def batch(backlog: Backlog) -> list[Item]:
    taken = backlog.take_batch()
    assert taken is not None
    return taken


def deliver(backlog: Backlog, items: list[Item]) -> None:
    backlog.bring_batch([EncodeResult(item) for item in items], 1, 1)


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_items_are_prepared_oldest_deadline_first(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 1, deadline_ns=FAR_NS))
    backlog.add(bench.job(2, 1, 1, deadline_ns=FAR_NS - 1))
    taken = [prepare(backlog) for _ in range(3)]
    assert [(item.job.ticket, item.index) for item in taken] == [(2, 0), (2, 1), (1, 0)]


def test_prepared_items_wait_within_a_bound(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=100)
    for ticket in range(5):
        backlog.add(bench.job(ticket, 80))
    prepare(backlog)
    prepare(backlog)
    waiting = in_thread(lambda: prepare(backlog))
    assert backlog.statistics()["prepared_patches"] == 160
    batch(backlog)  # takes 80 patches away
    waiting.join()
    assert backlog.statistics()["prepared_patches"] == 160


def test_an_item_over_the_bound_is_prepared_alone(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=10)
    backlog.add(bench.job(1, 5000))
    assert prepare(backlog).cost_patches == 5000


def test_a_job_is_ready_when_its_last_item_is(bench: Bench) -> None:
    backlog = bench.backlog(max_items=1)
    job = bench.job(1, 1, 1)
    backlog.add(job)
    prepare(backlog)
    prepare(backlog)
    deliver(backlog, batch(backlog))
    assert bench.records() == []
    assert bench.block_state(job) is BlockState.FILLING
    deliver(backlog, batch(backlog))
    assert [record.kind for record in bench.records()] == [CompletionKind.READY]
    assert bench.block_state(job) is BlockState.READY


def test_rows_become_visible_in_request_order_only(bench: Bench) -> None:
    backlog = bench.backlog(max_items=1)
    job = bench.job(1, 1, 1)
    assert job.block is not None
    backlog.add(job)
    prepare(backlog)
    prepare(backlog)
    first, second = batch(backlog), batch(backlog)
    deliver(backlog, second)
    assert bench.reader.header(job.block.block).rows_ready == 0
    deliver(backlog, first)
    assert bench.reader.header(job.block.block).rows_ready == 2


def test_a_failed_job_ends_only_when_nobody_holds_an_item_of_it(bench: Bench) -> None:
    backlog = bench.backlog(max_items=1)
    job = bench.job(1, 1, 1, 1)
    backlog.add(job)
    prepare(backlog)
    on_the_device = batch(backlog)
    decoding = backlog.take_to_prepare()
    bad = backlog.take_to_prepare()
    assert decoding is not None and bad is not None  # noqa: PT018
    backlog.drop_unprepared(bad, ItemError(ErrorCode.TRUNCATED, 1, 2))
    backlog.bring_prepared(decoding, Prepared("image", decoding.plan), 1)
    assert bench.records() == []
    assert bench.block_state(job) is BlockState.FILLING
    deliver(backlog, on_the_device)
    [record] = bench.records()
    assert (record.kind, record.error, record.error_item) == (
        CompletionKind.FAILED,
        ErrorCode.TRUNCATED,
        2,
    )
    assert (record.error_value, record.error_limit) == (1, 2)
    assert bench.block_state(job) is BlockState.FAILED
    assert backlog.statistics() == {
        "jobs": 0,
        "waiting_items": 0,
        "prepared_items": 0,
        "prepared_patches": 0,
    }


def test_a_cancelled_job_gives_its_prepared_patches_back(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 30, 30))
    prepare(backlog)
    backlog.cancel(1)
    [record] = bench.records()
    assert (record.kind, record.error) == (CompletionKind.FAILED, ErrorCode.CANCELLED)
    assert backlog.statistics()["prepared_patches"] == 0


def test_a_job_whose_items_are_all_on_the_device_is_not_cancelled(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 1))
    prepare(backlog)
    on_the_device = batch(backlog)
    backlog.cancel(1)
    deliver(backlog, on_the_device)
    assert [record.kind for record in bench.records()] == [CompletionKind.READY]


def test_expired_jobs_never_reach_the_device(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 1, deadline_ns=time.monotonic_ns() + 20_000_000))
    backlog.add(bench.job(2, 1))
    prepare(backlog)
    prepare(backlog)
    while not bench.control.completions.pending():
        backlog.drop_expired()
    assert [item.job.ticket for item in batch(backlog)] == [2]
    [record] = bench.records()
    assert (record.ticket, record.error) == (1, ErrorCode.DEADLINE)


def test_an_expired_job_is_failed_instead_of_prepared(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 1, deadline_ns=time.monotonic_ns()))
    backlog.add(bench.job(2, 1))
    assert prepare(backlog).job.ticket == 2
    assert [record.error for record in bench.records()] == [ErrorCode.DEADLINE]


def test_an_idle_device_starts_with_the_first_prepared_item(bench: Bench) -> None:
    backlog = bench.backlog()
    taken: list[list[Item]] = []
    device = in_thread(lambda: taken.append(batch(backlog)))
    backlog.add(bench.job(1, 1, 1, 1))
    prepare(backlog)
    device.join()
    assert [item.index for item in taken[0]] == [0]


def test_takers_are_let_go_when_the_last_job_has_ended(bench: Bench) -> None:
    backlog = bench.backlog()
    backlog.add(bench.job(1, 1))
    prepare(backlog)
    on_the_device = batch(backlog)
    backlog.finish()
    answers: list[object] = []
    takers = [in_thread(lambda: answers.append(backlog.take_to_prepare())) for _ in range(2)]
    takers.append(in_thread(lambda: answers.append(backlog.take_batch())))
    deliver(backlog, on_the_device)
    for taker in takers:
        taker.join()
    assert answers == [None, None, None]


def test_a_full_completion_ring_is_an_error_and_not_a_wait(bench: Bench) -> None:
    for ticket in range(16):
        bench.publisher.refused(ticket, ItemError(ErrorCode.CANCELLED))
    with pytest.raises(CompletionRingFull):
        bench.publisher.refused(16, ItemError(ErrorCode.CANCELLED))
