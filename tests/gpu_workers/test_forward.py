"""Isolation: what breaks a forward fails alone, its batch neighbours do not notice."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from gpu_workers.backlog import Backlog, BatchLimits
from gpu_workers.deliver import Deliverer, Encoded
from gpu_workers.device import Failure, PlainDevice
from gpu_workers.errors import DeviceLost, ItemError
from gpu_workers.families.base import MediaItem, Prepared, Rows
from gpu_workers.families.stub import StubFamily, stub_rows
from gpu_workers.faults import Faults
from gpu_workers.forward import DeviceLoop
from gpu_workers.heart import Heart
from gpu_workers.jobs import Item, Job
from gpu_workers.publish import Publisher
from shm.errors import ErrorCode
from shm.layout import BlockState, CompletionKind
from shm.link import WorkerLink, create_link
from shm.region import Backing
from tests.gpu_workers.harness import Harness


class SmallMemoryFamily(StubFamily):
    """A stub tower whose device holds `capacity` items at once, and breaks on some bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.forwards: list[int] = []

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        self.forwards.append(len(batch))
        if any(b"large" in bytes(prepared.features["data"]) for prepared in batch):
            raise MemoryError
        if len(batch) > self.capacity:
            raise MemoryError
        if any(b"poison" in bytes(prepared.features["data"]) for prepared in batch):
            raise ValueError("poison")
        return super().forward(batch)


class BrokenDevice(PlainDevice):
    """A device whose every error is sticky."""

    def failure(self, error: Exception) -> Failure:
        return Failure.STICKY


@pytest.fixture
def link() -> Iterator[WorkerLink]:
    with ExitStack() as undo:
        region = undo.enter_context(create_link(64, os.urandom(16), 0, 1, Backing.MEMFD))
        bell = os.eventfd(0)
        undo.callback(os.close, bell)
        yield WorkerLink(region, bell)


def device_loop(link: WorkerLink, family: StubFamily, device: PlainDevice) -> DeviceLoop:
    faults = Faults([])
    backlog = Backlog(Publisher(link, faults), BatchLimits(64, 100_000), lambda: None)
    heart = Heart(link)
    return DeviceLoop(backlog, family, device, Deliverer(backlog, device, heart).deliver, heart, faults)


def prepared_items(family: StubFamily, *contents: bytes) -> list[Item]:
    job = Job(ticket=1, deadline_ns=1, modality="image")
    for content in contents:
        data = memoryview(content)
        media = MediaItem("image", (data,))
        plan = family.measure(media)
        job.add_item(media, plan)
        job.items[-1].prepared = family.preprocess(media, plan)
    return job.items


def codes(encoded: list[Encoded]) -> list[ErrorCode | None]:
    return [entry.outcome.code if isinstance(entry.outcome, ItemError) else None for entry in encoded]


def test_one_poison_item_is_found_by_bisection(link: WorkerLink) -> None:
    family = SmallMemoryFamily(capacity=64)
    contents = [b"item %d" % n for n in range(16)]
    contents[11] = b"poison"
    encoded = device_loop(link, family, PlainDevice()).encode(prepared_items(family, *contents))
    assert codes(encoded) == [ErrorCode.FORWARD_FAILED if n == 11 else None for n in range(16)]
    assert all(
        np.array_equal(entry.outcome, stub_rows(content))
        for entry, content in zip(encoded, contents, strict=True)
        if not isinstance(entry.outcome, ItemError)
    )
    assert family.forwards == [16, 8, 8, 4, 2, 2, 1, 1, 4]


def test_a_batch_too_large_for_memory_is_halved_once(link: WorkerLink) -> None:
    family = SmallMemoryFamily(capacity=4)
    items = prepared_items(family, *(b"item %d" % n for n in range(8)))
    encoded = device_loop(link, family, PlainDevice()).encode(items)
    assert codes(encoded) == [None] * 8
    assert family.forwards == [8, 4, 4]


def test_halves_too_large_for_memory_go_item_by_item(link: WorkerLink) -> None:
    family = SmallMemoryFamily(capacity=1)
    items = prepared_items(family, *(b"item %d" % n for n in range(8)))
    encoded = device_loop(link, family, PlainDevice()).encode(items)
    assert codes(encoded) == [None] * 8
    assert family.forwards == [8, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1]


def test_an_item_too_large_for_memory_fails_alone(link: WorkerLink) -> None:
    family = SmallMemoryFamily(capacity=8)
    items = prepared_items(family, b"a", b"large", b"b", b"c")
    encoded = device_loop(link, family, PlainDevice()).encode(items)
    assert codes(encoded) == [None, ErrorCode.OUT_OF_DEVICE_MEMORY, None, None]


def test_a_sticky_error_is_not_retried(link: WorkerLink) -> None:
    family = SmallMemoryFamily(capacity=8)
    with pytest.raises(DeviceLost):
        device_loop(link, family, BrokenDevice()).encode(prepared_items(family, b"poison", b"good"))
    assert family.forwards == [2]


def test_rows_that_are_not_as_planned_fail_their_item(link: WorkerLink) -> None:
    family = StubFamily()
    [item] = prepared_items(family, b"stub rows=4")
    [other] = prepared_items(family, b"stub rows=5")
    item.prepared = other.prepared
    assert codes(device_loop(link, family, PlainDevice()).encode([item])) == [ErrorCode.FORWARD_FAILED]


def test_a_worker_answers_the_neighbours_of_a_poison_item(worker: Harness) -> None:
    worker.shape_of(worker.submit(b"stub forward_ms=100"))
    contents = [b"stub n=%d%s" % (n, b" fault=error-in-forward" if n == 5 else b"") for n in range(8)]
    tickets = [worker.submit(content) for content in contents]
    ends = [worker.outcome_of(ticket).end for ticket in tickets]
    assert [end.error for end in ends] == [ErrorCode.FORWARD_FAILED if n == 5 else 0 for n in range(8)]
    assert worker.header(ends[5]).state == BlockState.FAILED
    for n in (0, 1, 2, 3, 4, 6, 7):
        assert np.array_equal(worker.rows(ends[n]), stub_rows(contents[n]))


def test_one_bad_item_fails_its_whole_request_and_names_itself(worker: Harness) -> None:
    end = worker.outcome(b"good", b"stub fault=error-in-decode", b"also good").end
    assert (end.kind, end.error, end.error_item) == (CompletionKind.FAILED, ErrorCode.DECODE_FAILED, 1)
    assert worker.outcome(b"next").end.kind is CompletionKind.READY
