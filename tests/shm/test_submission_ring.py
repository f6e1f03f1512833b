"""shm.submission_ring: ended leases arrive in any case, from any thread, even in the middle of a send."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from shm.layout import SESSION_SLOT_COUNT, RegionKind, SessionDescriptor, SessionKind
from shm.region import attach_region
from shm.session import SessionRegions, create_session_regions
from shm.submission_ring import SubmissionRing


@pytest.fixture
def regions() -> Iterator[SessionRegions]:
    with create_session_regions(bytes(16), 1) as regions:
        yield regions


@pytest.fixture
def ring(regions: SessionRegions) -> Iterator[SubmissionRing]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = attach_region(os.dup(regions.client.fd), RegionKind.SESSION_CLIENT, writable=True)
    control = attach_region(os.dup(regions.control_read_only_fd), RegionKind.SESSION_CONTROL, writable=False)
    ring = SubmissionRing(client, control, os.dup(regions.bell), ours)
    with theirs:
        yield ring
        ring.close()
        assert theirs.recv(1) == b""  # closing is what ends the leases


def arrived(regions: SessionRegions) -> list[int]:
    leases = []
    while (slot := regions.submissions.try_take()) is not None:
        descriptor = SessionDescriptor.unpack(slot)
        assert descriptor.kind == SessionKind.RELEASE
        leases.append(descriptor.lease)
    return leases


def test_leases_arrive_in_the_order_in_which_they_ended(
    regions: SessionRegions, ring: SubmissionRing
) -> None:
    for lease in range(100):
        ring.end(lease)
    assert arrived(regions) == list(range(100))


def test_what_a_full_ring_cannot_take_comes_with_a_later_call(
    regions: SessionRegions, ring: SubmissionRing
) -> None:
    for lease in range(SESSION_SLOT_COUNT + 5):
        ring.end(lease)
    assert ring.waiting() == 5
    assert len(arrived(regions)) == SESSION_SLOT_COUNT
    ring.flush()
    assert ring.waiting() == 0
    assert arrived(regions) == list(range(SESSION_SLOT_COUNT, SESSION_SLOT_COUNT + 5))


def test_threads_end_leases_and_every_one_arrives_once(regions: SessionRegions, ring: SubmissionRing) -> None:
    def end(first: int) -> None:
        for lease in range(first, first + 200):
            ring.end(lease)

    threads = [threading.Thread(target=end, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ring.waiting() == 0
    expected = [1000 * index + lease for index in range(4) for lease in range(200)]
    assert sorted(arrived(regions)) == expected


def test_a_closed_ring_takes_leases_and_sends_none(regions: SessionRegions, ring: SubmissionRing) -> None:
    ring.close()
    ring.end(1)
    assert arrived(regions) == []
