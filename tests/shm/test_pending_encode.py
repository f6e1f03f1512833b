"""shm.pending_encode: its result is taken once, and nobody's lease is lost; control is played by hand."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shm.encode_request import pack_request
from shm.encode_ring import EncodeRing
from shm.layout import (
    RegionKind,
    SessionAnswer,
    SessionCompletion,
    SessionDescriptor,
    SessionKind,
    SessionWait,
)
from shm.pending_encode import PendingEncode
from shm.region import attach_region
from shm.session import SessionRegions, create_session_regions
from shm.submission_ring import SubmissionRing

INPUT_BYTES = 1 << 20


@pytest.fixture
def regions() -> Iterator[SessionRegions]:
    with create_session_regions(bytes(16), 1, INPUT_BYTES) as regions:
        yield regions


@pytest.fixture
def ended() -> list[int]:
    """The leases that nobody wanted."""
    return []


@pytest.fixture
def ring(regions: SessionRegions, ended: list[int]) -> Iterator[EncodeRing]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = attach_region(os.dup(regions.client.fd), RegionKind.SESSION_CLIENT, writable=True)
    control_fd = os.dup(regions.control_read_only_fd)
    control = attach_region(control_fd, RegionKind.SESSION_CONTROL, writable=False)
    submissions = SubmissionRing(client, control, os.dup(regions.bell), ours)
    ring = EncodeRing(submissions, client, control, INPUT_BYTES, lambda: None, ended.append)
    with theirs:
        yield ring
        ring.close()
        submissions.close()


def begin(ring: EncodeRing, seen: list[SessionCompletion]) -> PendingEncode:
    """One whose view is only the answer."""

    def view_of(answer: SessionCompletion) -> Any:
        seen.append(answer)
        return answer

    call = ring.begin(pack_request([b"item"], "image", ""), SessionWait.READY, 60.0)
    return PendingEncode(ring, call, view_of)


def taken(regions: SessionRegions) -> list[SessionDescriptor]:
    return list(SessionDescriptor.unpack_many(regions.submissions.take_many(64, 0)))


def answer(regions: SessionRegions, request: int, lease: int) -> None:
    completion = SessionCompletion(SessionAnswer.READY, request, lease)
    assert regions.completions.try_publish(completion.pack())


def test_the_result_is_taken_once(regions: SessionRegions, ring: EncodeRing, ended: list[int]) -> None:
    seen: list[SessionCompletion] = []
    pending = begin(ring, seen)
    [asked] = taken(regions)
    answer(regions, asked.request, lease=7)
    pending.result()
    assert [completion.lease for completion in seen] == [7]
    with pytest.raises(ValueError, match="taken already"):
        pending.result()
    pending.cancel()
    assert taken(regions) == []
    assert ended == [], "the lease is the view's"


def test_a_cancelled_one_is_told_to_the_daemon_and_its_late_lease_ends(
    regions: SessionRegions, ring: EncodeRing, ended: list[int]
) -> None:
    pending = begin(ring, [])
    [asked] = taken(regions)
    pending.cancel()
    pending.cancel()
    [order] = taken(regions)
    assert (order.kind, order.request) == (SessionKind.CANCEL, asked.request)
    answer(regions, asked.request, lease=8)
    other = begin(ring, [])
    [asked] = taken(regions)
    answer(regions, asked.request, lease=9)
    other.result()
    assert ended == [8]


def test_a_forgotten_one_is_cancelled_with_the_next_encode(regions: SessionRegions, ring: EncodeRing) -> None:
    pending = begin(ring, [])
    [asked] = taken(regions)
    del pending
    assert taken(regions) == [], "the garbage collector comes in the middle of anything"
    begin(ring, []).cancel()
    kinds = [(order.kind, order.request) for order in taken(regions)]
    assert kinds[0] == (SessionKind.CANCEL, asked.request)
