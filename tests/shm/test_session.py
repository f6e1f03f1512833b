"""shm.session: what each side of a session may do with its regions, and the socket's datagrams."""

import mmap
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from shm import _core
from shm.errors import RegionCorrupt, SessionClosed
from shm.layout import SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT, RegionKind, SessionDescriptor, SessionKind
from shm.messages import Attach, Attached, Refused
from shm.region import attach_region
from shm.session import (
    DATAGRAM_BYTES,
    SessionRegions,
    create_session_regions,
    peer_credentials,
    read_run,
    recv_datagram,
    send_datagram,
)

ATTACHES = msgspec.msgpack.Decoder(Attach)
ANSWERS = msgspec.msgpack.Decoder(Attached | Refused)
ATTACH = Attach("nonce", 1, 2, 3, 4)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def regions() -> Iterator[SessionRegions]:
    with create_session_regions(bytes(16), 5) as regions:
        yield regions


def client_producer(regions: SessionRegions) -> _core.Producer:
    client = attach_region(os.dup(regions.client.fd), RegionKind.SESSION_CLIENT, writable=True)
    control = attach_region(os.dup(regions.control_read_only_fd), RegionKind.SESSION_CONTROL, writable=False)
    return _core.Producer(
        client.memory,
        SESSION_SIDE_OFFSET,
        control.memory,
        SESSION_SIDE_OFFSET,
        SESSION_SLOT_COUNT,
        regions.bell,
    )


def test_releases_travel_on_the_ring_and_ring_the_bell_once_armed(regions: SessionRegions) -> None:
    producer = client_producer(regions)
    assert producer.try_publish(SessionDescriptor(SessionKind.RELEASE, 7).pack())
    with pytest.raises(BlockingIOError):
        os.eventfd_read(regions.bell)
    slot = regions.submissions.try_take()
    assert slot is not None
    assert SessionDescriptor.unpack(slot) == SessionDescriptor(SessionKind.RELEASE, 7)
    assert regions.submissions.arm()
    assert producer.try_publish(SessionDescriptor(SessionKind.RELEASE, 8).pack())
    assert os.eventfd_read(regions.bell) == 1
    assert regions.submissions.pending() == 1


def test_a_full_ring_refuses_and_recovers(regions: SessionRegions) -> None:
    producer = client_producer(regions)
    slot = SessionDescriptor(SessionKind.RELEASE, 1).pack()
    assert sum(producer.try_publish(slot) for _ in range(SESSION_SLOT_COUNT + 3)) == SESSION_SLOT_COUNT
    assert regions.submissions.try_take() is not None
    assert producer.try_publish(slot)


def test_the_client_cannot_resize_its_region_nor_write_controls(regions: SessionRegions) -> None:
    for nbytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(regions.client.fd, nbytes)
    with pytest.raises(PermissionError):
        mmap.mmap(regions.control_read_only_fd, 4096)
    # Even this user's way round: a writable re-open of the read-only descriptor. The seal refuses it.
    reopened = os.open(f"/proc/self/fd/{regions.control_read_only_fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(reopened, b"x", SESSION_SIDE_OFFSET)
    os.close(reopened)


def test_whatever_the_client_writes_control_sees_a_release_nothing_or_corrupt(
    regions: SessionRegions,
) -> None:
    for _ in range(200):
        regions.client.view[:] = os.urandom(regions.client.size_bytes)
        try:
            slot = regions.submissions.try_take()
        except RegionCorrupt:
            continue
        assert slot is None or len(slot) == 128
    assert regions.client.header.kind is RegionKind.SESSION_CLIENT


def test_closing_gives_every_descriptor_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    regions = create_session_regions(bytes(16), 1)
    assert len(regions.descriptors) == 3
    regions.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_datagram_brings_its_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    send_datagram(ours, Attached(9), [writing])
    os.close(writing)
    message, descriptors = recv_datagram(theirs, ANSWERS, 1)
    assert message == Attached(9)
    assert not os.get_inheritable(descriptors[0])
    os.write(descriptors[0], b"through")
    os.close(descriptors[0])
    assert os.read(reading, 100) == b"through"
    os.close(reading)


def test_the_peers_hang_up_closes_the_session(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    with pytest.raises(SessionClosed):
        recv_datagram(theirs, ATTACHES, 0)
    with pytest.raises(SessionClosed):
        send_datagram(theirs, ATTACH, [])


@pytest.mark.parametrize(
    "data",
    [
        b"\x00", b"\xc1", b"not msgpack at all", msgspec.msgpack.encode(Attached(1)),
        msgspec.msgpack.encode(ATTACH)[:-1], msgspec.msgpack.encode(ATTACH) + b"x", bytes(DATAGRAM_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_message_closes_the_session(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    ours, theirs = pair
    ours.send(data)
    with pytest.raises(SessionClosed):
        recv_datagram(theirs, ATTACHES, 0)


@pytest.mark.parametrize(("sent", "allowed"), [(1, 0), (2, 1), (8, 2)])
def test_unwanted_descriptors_close_the_session_and_none_stays_open(
    pair: tuple[socket.socket, socket.socket], sent: int, allowed: int
) -> None:
    ours, theirs = pair
    before = set(os.listdir("/proc/self/fd"))
    send_datagram(ours, ATTACH, [ours.fileno()] * sent)
    with pytest.raises(SessionClosed, match="longer than"):
        recv_datagram(theirs, ATTACHES, allowed)
    assert set(os.listdir("/proc/self/fd")) == before


def test_too_long_a_datagram_is_the_senders_mistake(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="datagram of"):
        send_datagram(pair[0], Refused("x" * DATAGRAM_BYTES), [])


def test_an_empty_socket_says_so_to_an_event_loop(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_datagram(pair[1], ATTACHES, 0)


def test_the_kernel_says_who_the_peer_is(pair: tuple[socket.socket, socket.socket]) -> None:
    assert peer_credentials(pair[0]) == (os.getpid(), os.getuid(), os.getgid())


def test_a_run_beyond_the_end_of_the_input_is_corrupt_and_ends() -> None:
    fd = os.memfd_create("short")
    try:
        with pytest.raises(RegionCorrupt, match="ends before"):
            read_run(fd, 0, memoryview(bytearray(4096)))
    finally:
        os.close(fd)
