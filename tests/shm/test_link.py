"""shm.link: both ends of a link, in two processes where it matters."""

import os
import select
from collections.abc import Iterator

import pytest

from shm.errors import RegionCorrupt
from shm.layout import (
    LINK_INFO_BYTES_OFFSET,
    LINK_INFO_CAPACITY_BYTES,
    LINK_STATE_OFFSET,
    Completion,
    CompletionKind,
    RegionKind,
    Submission,
    SubmissionKind,
    WorkerState,
)
from shm.link import ControlLink, WorkerLink, create_link
from shm.messages import WorkerInfo
from shm.region import Backing, Region, attach_region
from tests.shm.processes import A_LONG_TIME_NS, forked

INFO = WorkerInfo("qwen2_vl", ["image"], 64, "float32", "cpu", 1234, 56)


@pytest.fixture
def eventfd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
def region() -> Iterator[Region]:
    with create_link(16, bytes(16), 1, 4, Backing.POSIX) as region:
        yield region


def test_work_goes_round_between_two_processes(region: Region, eventfd: int) -> None:
    control = ControlLink(region, eventfd)

    def work() -> None:
        with attach_region(os.dup(region.fd), RegionKind.LINK, writable=True) as mapped:
            link = WorkerLink(mapped, eventfd)
            link.set_state(WorkerState.READY)
            slot = link.submissions.take(A_LONG_TIME_NS)
            assert slot is not None
            submission = Submission.unpack(slot)
            completion = Completion(CompletionKind.READY, submission.ticket, block=submission.block)
            assert link.completions.try_publish(completion.pack())

    with forked(work) as child:
        assert control.submissions.try_publish(Submission(SubmissionKind.ENCODE, ticket=77, block=5).pack())
        while (slot := control.completions.try_take()) is None:
            if control.completions.arm():
                select.select([eventfd], [], [])
                os.eventfd_read(eventfd)
        assert Completion.unpack(slot) == Completion(CompletionKind.READY, 77, block=5)
        assert child.wait() == 0
    assert control.state() is WorkerState.READY


def test_a_new_link_is_starting_and_has_no_heartbeat(region: Region, eventfd: int) -> None:
    control = ControlLink(region, eventfd)
    assert control.state() is WorkerState.STARTING
    assert (control.heartbeat_ns(), control.oldest_step_ns()) == (0, 0)
    assert control.failure() == ""


def test_a_heartbeat_tells_the_time_and_the_oldest_step(region: Region, eventfd: int) -> None:
    control, worker = ControlLink(region, eventfd), WorkerLink(region, eventfd)
    worker.heartbeat(12345)
    first = control.heartbeat_ns()
    worker.heartbeat(0)
    assert control.heartbeat_ns() >= first > 0
    assert control.oldest_step_ns() == 0


def test_info_arrives_as_it_was_published(region: Region, eventfd: int) -> None:
    WorkerLink(region, eventfd).publish_info(INFO)
    assert ControlLink(region, eventfd).info() == INFO


def test_a_failure_arrives_as_one_line_cut_to_what_fits(region: Region, eventfd: int) -> None:
    control, worker = ControlLink(region, eventfd), WorkerLink(region, eventfd)
    worker.publish_failure("no such\n checkpoint\x00: é")
    assert control.failure() == "no such checkpoint\x00: é"
    worker.publish_failure("é" * LINK_INFO_CAPACITY_BYTES)
    assert control.failure() == "é" * (LINK_INFO_CAPACITY_BYTES // 2)
    worker.publish_failure("x" + "é" * LINK_INFO_CAPACITY_BYTES)
    assert control.failure() == "x" + "é" * (LINK_INFO_CAPACITY_BYTES // 2 - 1)


def test_info_that_does_not_fit_is_refused(region: Region, eventfd: int) -> None:
    long = WorkerInfo("x" * LINK_INFO_CAPACITY_BYTES, [], 1, "", "", 0, 0)
    with pytest.raises(ValueError, match="at most"):
        WorkerLink(region, eventfd).publish_info(long)


@pytest.mark.parametrize("state", [5, 2**64 - 1])
def test_an_unknown_state_is_corrupt(region: Region, eventfd: int, state: int) -> None:
    region.view[LINK_STATE_OFFSET : LINK_STATE_OFFSET + 8] = state.to_bytes(8, "little")
    with pytest.raises(RegionCorrupt, match="state"):
        ControlLink(region, eventfd).state()


@pytest.mark.parametrize("nbytes", [LINK_INFO_CAPACITY_BYTES + 1, 2**64 - 1])
def test_an_info_run_longer_than_its_room_is_corrupt(region: Region, eventfd: int, nbytes: int) -> None:
    region.view[LINK_INFO_BYTES_OFFSET : LINK_INFO_BYTES_OFFSET + 8] = nbytes.to_bytes(8, "little")
    for read in (ControlLink(region, eventfd).info, ControlLink(region, eventfd).failure):
        with pytest.raises(RegionCorrupt, match="info run"):
            read()


def test_an_info_run_that_is_no_info_is_corrupt(region: Region, eventfd: int) -> None:
    WorkerLink(region, eventfd).publish_failure("words")
    with pytest.raises(RegionCorrupt, match="decoded"):
        ControlLink(region, eventfd).info()
