"""Descriptors from control: checks, sizes, space, cancellation, deadlines."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from gpu_workers.families.stub import STUB_DIM, stub_rows
from shm.errors import ErrorCode
from shm.layout import NO_BLOCK, BlockState, CompletionKind
from shm.messages import ItemSource, Part, RequestMetadata
from tests.gpu_workers.harness import Harness, Outcome

StartWorker = Callable[..., Harness]

SMALL_SEGMENT_BYTES = 1 << 20
HALF_OF_IT = b"stub rows=%d" % (SMALL_SEGMENT_BYTES // 2 // (4 * STUB_DIM))


def assert_failed(outcome: Outcome, code: ErrorCode, item: int = 0) -> None:
    assert outcome.end.kind is CompletionKind.FAILED
    assert (outcome.end.error, outcome.end.error_item) == (code, item)


def test_an_item_of_no_bytes_is_refused_by_its_number(worker: Harness) -> None:
    outcome = worker.outcome(b"good", b"")
    assert_failed(outcome, ErrorCode.EMPTY_ITEM, item=1)
    assert outcome.shape_known is None


def test_an_unknown_modality_is_refused(worker: Harness) -> None:
    assert_failed(worker.outcome(b"x", modality="smell"), ErrorCode.MODALITY_UNSUPPORTED)


def test_a_passed_deadline_is_refused_at_the_take(worker: Harness) -> None:
    assert_failed(worker.outcome(b"x", deadline_seconds=-1), ErrorCode.DEADLINE)


@pytest.mark.parametrize(
    ("metadata", "item_count"),
    [
        (b"\xc1 no msgpack", 1),
        (msgspec.msgpack.encode(RequestMetadata("image", [])), 0),
        (msgspec.msgpack.encode(RequestMetadata("image", [ItemSource(100, 10)])), 2),
        (msgspec.msgpack.encode(RequestMetadata("image", [ItemSource(100, 4096)])), 1),
        (msgspec.msgpack.encode(RequestMetadata("image", [ItemSource(-1, 10)])), 1),
        (msgspec.msgpack.encode(RequestMetadata("image", [ItemSource(100, -1)])), 1),
        (msgspec.msgpack.encode(RequestMetadata("video", [ItemSource(0, 9, "frames", [Part(510, 3)])])), 1),
    ],
)
def test_metadata_that_makes_no_sense_fails_its_ticket_alone(
    worker: Harness, metadata: bytes, item_count: int
) -> None:
    ticket = worker.submit_raw(metadata, [], nbytes=512, item_count=item_count)
    assert_failed(worker.outcome_of(ticket), ErrorCode.INTERNAL)
    assert worker.outcome(b"good").end.kind is CompletionKind.READY


def test_what_an_empty_segment_cannot_hold_is_refused_with_both_sizes(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    end = worker.outcome(b"stub rows=2000").end
    assert (end.error, end.block) == (ErrorCode.TOO_LARGE_FOR_SEGMENT, NO_BLOCK)
    assert end.error_value == 2000 * STUB_DIM * 4 > end.error_limit > 0


def test_a_job_waits_for_a_reclaim_when_the_segment_is_full(start_worker: StartWorker) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    first = worker.outcome(HALF_OF_IT + b" a").end
    late = worker.submit(HALF_OF_IT + b" b")
    small = worker.submit(b"stub rows=1")  # behind it in the queue: nobody overtakes
    worker.reclaim(first)
    assert np.array_equal(worker.rows(worker.outcome_of(late).end), stub_rows(HALF_OF_IT + b" b"))
    assert worker.outcome_of(small).end.kind is CompletionKind.READY


def test_a_job_that_never_gets_space_fails_as_segment_full(start_worker: StartWorker) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    worker.outcome(HALF_OF_IT + b" a")
    outcome = worker.outcome(HALF_OF_IT + b" b")
    assert_failed(outcome, ErrorCode.SEGMENT_FULL)
    assert outcome.end.block == NO_BLOCK


def test_a_job_that_waits_for_space_can_be_cancelled_or_expire(start_worker: StartWorker) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    first = worker.outcome(HALF_OF_IT + b" a").end
    cancelled = worker.submit(HALF_OF_IT + b" b")
    expiring = worker.submit(HALF_OF_IT + b" c", deadline_seconds=0.3)
    worker.cancel(cancelled)
    assert_failed(worker.outcome_of(cancelled), ErrorCode.CANCELLED)
    assert_failed(worker.outcome_of(expiring), ErrorCode.DEADLINE)
    worker.reclaim(first)
    assert worker.outcome(HALF_OF_IT + b" d").end.kind is CompletionKind.READY


def test_a_queued_ticket_can_be_cancelled(start_worker: StartWorker) -> None:
    worker = start_worker(max_batch_items=1)
    worker.submit(b"stub fault=hang-in-forward")  # older, so the device takes it first, and for good
    queued = worker.submit(b"queued")
    worker.shape_of(queued)
    worker.cancel(queued)
    outcome = worker.outcome_of(queued)
    assert_failed(outcome, ErrorCode.CANCELLED)
    assert worker.header(outcome.end).state == BlockState.FAILED


def test_a_queued_ticket_expires_before_its_forward(start_worker: StartWorker) -> None:
    worker = start_worker(max_batch_items=1)
    worker.submit(b"stub fault=hang-in-forward", deadline_seconds=1)
    queued = worker.submit(b"queued", deadline_seconds=1.2)
    outcome = worker.outcome_of(queued)
    assert_failed(outcome, ErrorCode.DEADLINE)
    assert worker.header(outcome.end).state == BlockState.FAILED


def test_cancelling_an_ended_or_unknown_ticket_changes_nothing(worker: Harness) -> None:
    end = worker.outcome(b"done").end
    worker.cancel(end.ticket)
    worker.cancel(999)
    assert worker.outcome(b"next").end.kind is CompletionKind.READY
    assert worker.header(end).state == BlockState.READY


def test_a_failed_block_is_reclaimed_like_any_other(start_worker: StartWorker) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    for _ in range(5):
        end = worker.outcome(HALF_OF_IT + b" fault=error-in-decode").end
        assert end.error == ErrorCode.DECODE_FAILED
        worker.reclaim(end)
    assert worker.outcome(HALF_OF_IT).end.kind is CompletionKind.READY


def test_an_item_whose_header_does_not_tell_its_size_is_measured_first(worker: Harness) -> None:
    unknown, known = b"stub rows=3 measure=1", b"stub rows=2"
    end = worker.outcome(unknown, known, unknown).end
    assert end.kind is CompletionKind.READY
    expected = np.concatenate([stub_rows(unknown), stub_rows(known), stub_rows(unknown)])
    assert np.array_equal(worker.rows(end), expected)


def test_measuring_one_item_does_not_keep_others_waiting(start_worker: StartWorker) -> None:
    worker = start_worker(max_batch_items=1)
    worker.submit(b"stub fault=hang-in-forward")
    measured = worker.submit(b"stub measure=1")
    other = worker.submit(b"stub rows=2")
    assert worker.shape_of(other).rows == 2
    assert worker.shape_of(measured).rows == 16


def test_what_is_found_too_large_when_measured_is_refused(start_worker: StartWorker) -> None:
    worker = start_worker(segment_bytes=SMALL_SEGMENT_BYTES)
    outcome = worker.outcome(b"stub measure=1 rows=4096")
    assert_failed(outcome, ErrorCode.TOO_LARGE_FOR_SEGMENT)
    assert outcome.shape_known is None


def test_a_list_of_frames_is_one_item_of_several_files(worker: Harness) -> None:
    first, second = b"stub rows=2", b"the second frame"
    source = ItemSource(256, 100, "frames", [Part(256, len(first)), Part(320, len(second))])
    metadata = msgspec.msgpack.encode(RequestMetadata("video", [source]))
    parts = [(ItemSource(256, len(first)), first), (ItemSource(320, len(second)), second)]
    end = worker.outcome_of(worker.submit_raw(metadata, parts, nbytes=512, item_count=1)).end
    assert np.array_equal(worker.rows(end), stub_rows(first))
