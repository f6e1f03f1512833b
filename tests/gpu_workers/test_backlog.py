"""The meeting point of the threads: who waits, who goes, and when a ticket ends."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from gpu_workers.backlog import Backlog, BatchLimits, EncodeResult, PrepareResult
from gpu_workers.errors import CompletionRingFull, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared
from gpu_workers.faults import Faults
from gpu_workers.jobs import Item, Job
from gpu_workers.publish import Publisher
from shm.errors import ErrorCode
from shm.layout import NO_BLOCK, BlockState, Completion, CompletionKind, Dtype
from shm.link import ControlLink, WorkerLink, create_link
from shm.region import Backing
from shm.segment import SegmentReader, SegmentWriter, create_segment

DIM = 8
FAR_NS = 1 << 62
MEDIA = MediaItem("image", (memoryview(b"x"),))


@dataclass
class Bench:
    """A backlog on real regions, and control's end of them."""

    publisher: Publisher
    writer: SegmentWriter
    reader: SegmentReader
    control: ControlLink
    woken: threading.Event = field(default_factory=threading.Event)

    def backlog(
        self,
        max_items: int = 8,
        max_patches: int = 100,
        max_wait_ns: int = 0,
        beside_forward: int | None = None,
    ) -> Backlog:
        limits = BatchLimits(max_items, max_patches, max_wait_ns, beside_forward)
        return Backlog(self.publisher, limits, self.woken.set)

    def job(self, ticket: int, *patches: int, deadline_ns: int = FAR_NS, at_once: bool = False) -> Job:
        """A job with one item of one row for each number of patches."""
        job = Job(ticket, deadline_ns, "image")
        for cost in patches:
            job.add_item(MEDIA, ItemPlan(1, [[1, 1, 1]], 1, 1, cost, prepares_at_once=at_once))
        job.lay_out_rows()
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


def begin(backlog: Backlog, job: Job) -> None:
    """What intake does with a job of known size."""
    backlog.open(job)
    backlog.admit(job)


def prepare(backlog: Backlog) -> Item:
    """Take the next item and bring it back prepared."""
    item = backlog.take_to_prepare()
    assert item is not None
    backlog.bring_prepared([PrepareResult(item, Prepared("image", item.plan), 1)])
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
    begin(backlog, bench.job(1, 1, deadline_ns=FAR_NS))
    begin(backlog, bench.job(2, 1, 1, deadline_ns=FAR_NS - 1))
    taken = [prepare(backlog) for _ in range(3)]
    assert [(item.job.ticket, item.index) for item in taken] == [(2, 0), (2, 1), (1, 0)]


def test_prepared_items_wait_within_a_bound(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=100)
    for ticket in range(5):
        begin(backlog, bench.job(ticket, 80))
    prepare(backlog)
    prepare(backlog)
    waiting = in_thread(lambda: prepare(backlog))
    assert backlog.statistics()["prepared_patches"] == 160
    batch(backlog)  # takes 80 patches away
    waiting.join()
    assert backlog.statistics()["prepared_patches"] == 160


def test_while_a_forward_runs_it_leaves_few_cores_to_preprocessing(bench: Bench) -> None:
    backlog = bench.backlog(beside_forward=1)
    begin(backlog, bench.job(1, *[1] * 6))
    ahead = [backlog.take_to_prepare() for _ in range(2)]  # the device is idle: every thread
    backlog.bring_prepared([PrepareResult(item, Prepared("image", item.plan)) for item in ahead if item])
    on_the_device = batch(backlog)
    held = backlog.take_to_prepare()
    assert held is not None
    taken: list[Item | None] = []
    second = in_thread(lambda: taken.append(backlog.take_to_prepare()))
    backlog.bring_prepared([PrepareResult(held, Prepared("image", held.plan))])
    second.join()  # one at a time
    third = in_thread(lambda: taken.append(backlog.take_to_prepare()))
    assert len(taken) == 1
    deliver(backlog, on_the_device)
    assert len(taken) == 1  # what is prepared already goes to the device before
    deliver(backlog, batch(backlog))
    third.join()  # the device is idle again
    assert [item.index for item in taken if item is not None] == [3, 4]


def test_nothing_is_prepared_beside_the_first_item_of_a_streamed_job_that_would_share_its_core(
    bench: Bench,
) -> None:
    backlog = bench.backlog(beside_forward=1)
    job = bench.job(1, *[1] * 16)
    job.is_streamed = True
    begin(backlog, job)
    first = backlog.take_to_prepare()
    assert first is not None
    taken: list[Item | None] = []
    second = in_thread(lambda: taken.append(backlog.take_to_prepare()))
    assert taken == []
    backlog.bring_prepared([PrepareResult(first, Prepared("image", first.plan))])
    second.join()  # beside the forward of the first
    assert [item.index for item in batch(backlog)] == [0]
    assert [item.index for item in taken if item is not None] == [1]


def test_an_item_over_the_bound_is_prepared_alone(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=10)
    begin(backlog, bench.job(1, 5000))
    assert prepare(backlog).cost_patches == 5000


def test_items_not_worth_a_hand_over_are_taken_by_whoever_admits_them(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=10)
    jobs = [bench.job(ticket, 8, at_once=True) for ticket in range(3)] + [bench.job(3, 1)]
    backlog.open(*jobs)
    taken = backlog.admit(*jobs, at_once=True)
    assert [item.job.ticket for item in taken] == [0, 1]  # the third would be over the bound of two batches
    assert backlog.statistics()["waiting_items"] == 2
    backlog.bring_prepared([PrepareResult(item, Prepared("image", item.plan), 1) for item in taken])
    assert [item.job.ticket for item in batch(backlog)] == [0]
    assert [prepare(backlog).job.ticket for _ in range(2)] == [2, 3]


def test_of_items_prepared_together_the_bad_one_fails_alone(bench: Bench) -> None:
    backlog = bench.backlog()
    jobs = [bench.job(ticket, 1, at_once=True) for ticket in range(3)]
    backlog.open(*jobs)
    good, bad, also_good = backlog.admit(*jobs, at_once=True)
    backlog.bring_prepared(
        [
            PrepareResult(good, Prepared("image", good.plan)),
            PrepareResult(bad, ItemError(ErrorCode.TRUNCATED)),
            PrepareResult(also_good, Prepared("image", also_good.plan)),
        ]
    )
    deliver(backlog, batch(backlog))
    ends = {record.ticket: record.error for record in bench.records()}
    assert ends == {0: 0, 1: ErrorCode.TRUNCATED, 2: 0}


def test_a_job_is_ready_when_its_last_item_is(bench: Bench) -> None:
    backlog = bench.backlog(max_items=1)
    job = bench.job(1, 1, 1)
    begin(backlog, job)
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
    begin(backlog, job)
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
    begin(backlog, job)
    prepare(backlog)
    on_the_device = batch(backlog)
    decoding = backlog.take_to_prepare()
    bad = backlog.take_to_prepare()
    assert decoding is not None and bad is not None  # noqa: PT018
    backlog.bring_prepared([PrepareResult(bad, ItemError(ErrorCode.TRUNCATED, 1, 2))])
    backlog.bring_prepared([PrepareResult(decoding, Prepared("image", decoding.plan), 1)])
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
    begin(backlog, bench.job(1, 30, 30))
    prepare(backlog)
    backlog.cancel(1)
    [record] = bench.records()
    assert (record.kind, record.error) == (CompletionKind.FAILED, ErrorCode.CANCELLED)
    assert backlog.statistics()["prepared_patches"] == 0


def test_a_job_whose_items_are_all_on_the_device_is_not_cancelled(bench: Bench) -> None:
    backlog = bench.backlog()
    begin(backlog, bench.job(1, 1))
    prepare(backlog)
    on_the_device = batch(backlog)
    backlog.cancel(1)
    deliver(backlog, on_the_device)
    assert [record.kind for record in bench.records()] == [CompletionKind.READY]


def test_expired_jobs_never_reach_the_device(bench: Bench) -> None:
    backlog = bench.backlog()
    begin(backlog, bench.job(1, 1, deadline_ns=time.monotonic_ns() + 20_000_000))
    begin(backlog, bench.job(2, 1))
    prepare(backlog)
    prepare(backlog)
    while not bench.control.completions.pending():
        backlog.drop_expired()
    assert [item.job.ticket for item in batch(backlog)] == [2]
    [record] = bench.records()
    assert (record.ticket, record.error) == (1, ErrorCode.DEADLINE)


def test_an_expired_job_is_failed_instead_of_prepared(bench: Bench) -> None:
    backlog = bench.backlog()
    begin(backlog, bench.job(1, 1, deadline_ns=time.monotonic_ns()))
    begin(backlog, bench.job(2, 1))
    assert prepare(backlog).job.ticket == 2
    assert [record.error for record in bench.records()] == [ErrorCode.DEADLINE]


def test_an_idle_device_starts_with_the_first_prepared_item(bench: Bench) -> None:
    backlog = bench.backlog()
    taken: list[list[Item]] = []
    device = in_thread(lambda: taken.append(batch(backlog)))
    begin(backlog, bench.job(1, 1, 1, 1))
    prepare(backlog)
    device.join()
    assert [item.index for item in taken[0]] == [0]


def test_takers_are_let_go_when_the_last_job_has_ended(bench: Bench) -> None:
    backlog = bench.backlog()
    begin(backlog, bench.job(1, 1))
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


def test_a_job_of_unknown_size_is_measured_before_it_is_admitted(bench: Bench) -> None:
    backlog = bench.backlog()
    job = Job(1, FAR_NS, "image")
    job.add_item(MEDIA, ItemPlan(1, [[1, 1, 1]], 1, 1, 7))
    job.add_item(MEDIA, None)
    backlog.open(job)
    assert backlog.take_measured() is None
    item = backlog.take_to_prepare()
    assert item is job.items[1]
    assert not bench.woken.is_set()
    backlog.bring_measured(item, ItemPlan(3, [[1, 3, 1]], 1, 1, 9), 1)
    assert bench.woken.is_set()
    assert backlog.take_measured() is job
    job.lay_out_rows()
    assert [item.row_start for item in job.items] == [0, 1]
    backlog.admit(job)
    assert [prepare(backlog).index for _ in range(2)] == [0, 1]


def test_a_job_that_cannot_be_measured_fails_without_a_block(bench: Bench) -> None:
    backlog = bench.backlog()
    job = Job(1, FAR_NS, "image")
    job.add_item(MEDIA, None)
    job.add_item(MEDIA, None)
    backlog.open(job)
    bad, good = backlog.take_to_prepare(), backlog.take_to_prepare()
    assert bad is not None and good is not None  # noqa: PT018
    backlog.bring_prepared([PrepareResult(bad, ItemError(ErrorCode.TRUNCATED))])
    assert bench.records() == []  # the other one is still held
    backlog.bring_measured(good, ItemPlan(1, [[1, 1, 1]], 1, 1, 1), 1)
    [record] = bench.records()
    assert (record.kind, record.error, record.block) == (
        CompletionKind.FAILED,
        ErrorCode.TRUNCATED,
        NO_BLOCK,
    )
    assert backlog.take_measured() is None


def test_measuring_does_not_wait_for_prepared_items_to_go(bench: Bench) -> None:
    backlog = bench.backlog(max_patches=10)
    begin(backlog, bench.job(1, 5000))
    prepare(backlog)
    job = Job(2, FAR_NS, "image")
    job.add_item(MEDIA, None)
    backlog.open(job)
    assert backlog.take_to_prepare() is job.items[0]


def test_a_job_is_cancelled_while_it_is_being_measured(bench: Bench) -> None:
    backlog = bench.backlog()
    job = Job(1, FAR_NS, "image")
    job.add_item(MEDIA, None)
    backlog.open(job)
    item = backlog.take_to_prepare()
    assert item is not None
    backlog.cancel(1)
    assert bench.records() == []
    backlog.bring_measured(item, ItemPlan(1, [[1, 1, 1]], 1, 1, 1), 1)
    assert [record.error for record in bench.records()] == [ErrorCode.CANCELLED]


def batch_sizes(backlog: Backlog, items: int) -> list[int]:
    """Take and bring batches until so many items are done."""
    sizes: list[int] = []
    while sum(sizes) < items:
        batch = backlog.take_batch()
        assert batch is not None
        sizes.append(len(batch))
        backlog.bring_batch([EncodeResult(item) for item in batch], 1, 1)
    return sizes


def test_a_streamed_job_goes_in_growing_batches_and_any_other_whole(bench: Bench) -> None:
    backlog = bench.backlog(max_items=32)
    for ticket, is_streamed, sizes in ((1, True, [1, 1, 2, 4, 8]), (2, False, [16])):
        job = bench.job(ticket, *[1] * 16)
        job.is_streamed = is_streamed
        begin(backlog, job)
        for _ in range(16):
            prepare(backlog)
        assert batch_sizes(backlog, 16) == sizes
    assert [record.ticket for record in bench.records()] == [1, 2]


def test_a_device_told_to_wait_waits_for_more_until_the_batch_is_full(bench: Bench) -> None:
    backlog = bench.backlog(max_items=3, max_wait_ns=FAR_NS // 1000)
    begin(backlog, bench.job(1, 1, 1, 1))
    batches: list[list[Item] | None] = []
    device = threading.Thread(target=lambda: batches.append(backlog.take_batch()))
    device.start()
    for _ in range(3):
        assert not batches
        prepare(backlog)
    device.join()
    assert [len(batch) for batch in batches if batch is not None] == [3]


def test_a_device_told_to_wait_goes_on_when_the_time_is_over(bench: Bench) -> None:
    backlog = bench.backlog(max_items=3, max_wait_ns=1_000_000)
    begin(backlog, bench.job(1, 1, 1))
    item = prepare(backlog)
    began_ns = item.prepared_ns
    assert backlog.take_batch() == [item]
    assert time.monotonic_ns() - began_ns >= 1_000_000


def test_nobody_waits_for_more_once_no_more_will_come(bench: Bench) -> None:
    backlog = bench.backlog(max_items=3, max_wait_ns=FAR_NS // 1000)
    begin(backlog, bench.job(1, 1))
    item = prepare(backlog)
    backlog.finish()
    assert backlog.take_batch() == [item]
