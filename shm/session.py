"""A session's regions and its socket's datagrams: what control's attach server and the client share.

No event loop and no threads here: app.sessions calls this from its loop, shm.client from its caller's
thread. The client writes one memfd, control another; neither ever reads its own words back.
"""

import os
import socket
import struct
from contextlib import ExitStack
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from shm import _core
from shm.errors import SessionClosed
from shm.layout import (
    CONSUMER_SIDE_BYTES,
    SESSION_SIDE_OFFSET,
    SESSION_SLOT_COUNT,
    RegionKind,
    page_align,
    producer_side_bytes,
)
from shm.region import Backing, Region, create_region, reopen_read_only, seal_against_writers, seal_size

DATAGRAM_BYTES: Final = 64 << 10
# SCM_MAX_FD: the kernel passes no more beside one datagram.
MAX_DESCRIPTORS: Final = 253
_CREDENTIALS: Final = struct.Struct("=iII")

Message = TypeVar("Message")


class PeerCredentials(NamedTuple):
    """Who is at the other end of a Unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


class SessionRegions:
    """Control's hold on one session's two memfds and its bell; closing it ends the ring.

    client: written by the client, untrusted. control: written here. `descriptors` go into Welcome.
    """

    def __init__(self, client: Region, control: Region, control_read_only_fd: int, bell: int) -> None:
        self.client = client
        self.control = control
        self.control_read_only_fd = control_read_only_fd
        self.bell = bell
        self.releases = _core.Consumer(
            client.memory, SESSION_SIDE_OFFSET, control.memory, SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT
        )

    @property
    def descriptors(self) -> list[int]:
        """What Welcome carries before the segments: client region, control region read-only, bell."""
        return [self.client.fd, self.control_read_only_fd, self.bell]

    def close(self) -> None:
        """Give everything back. `releases` refuses to be used afterwards."""
        self.releases.close()
        self.client.close()
        self.control.close()
        os.close(self.control_read_only_fd)
        os.close(self.bell)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def create_session_regions(boot_id: bytes, session: int) -> SessionRegions:
    """Two new memfds and an eventfd for one session. RegionUnavailable.

    The client's is sealed SHRINK|GROW|SEAL: a reader that could shrink it would kill control by SIGBUS.
    Control's is sealed against every new writer, so that its read-only descriptor stays read-only.
    """
    with ExitStack() as undo:
        client = undo.enter_context(
            create_region(
                RegionKind.SESSION_CLIENT,
                page_align(SESSION_SIDE_OFFSET + producer_side_bytes(SESSION_SLOT_COUNT)),
                boot_id=boot_id,
                place=session,
                capacity=SESSION_SLOT_COUNT,
                backing=Backing.MEMFD,
                label="session-client",
            )
        )
        seal_size(client.fd)
        control = undo.enter_context(
            create_region(
                RegionKind.SESSION_CONTROL,
                page_align(SESSION_SIDE_OFFSET + CONSUMER_SIDE_BYTES),
                boot_id=boot_id,
                place=session,
                capacity=SESSION_SLOT_COUNT,
                backing=Backing.MEMFD,
                label="session-control",
            )
        )
        seal_against_writers(control.fd)
        read_only_fd = reopen_read_only(control.fd)
        undo.callback(os.close, read_only_fd)
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(os.close, bell)
        regions = SessionRegions(client, control, read_only_fd, bell)
        undo.pop_all()
    return regions


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED: the process that called connect(), whatever it says of itself."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(raw))


def send_datagram(connection: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    """One msgpack struct with descriptors beside it. The descriptors stay the caller's.

    ValueError if it is too long; BlockingIOError from a non-blocking socket whose buffer is full;
    SessionClosed if the peer is gone.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > DATAGRAM_BYTES or len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"a datagram of {len(data)} bytes and {len(descriptors)} descriptors")
    try:
        if descriptors:
            socket.send_fds(connection, [data], descriptors, socket.MSG_NOSIGNAL)
        else:
            connection.send(data, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        raise SessionClosed("the other end of the session is gone") from None


def recv_datagram(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[Message], max_descriptors: int
) -> tuple[Message, list[int]]:
    """The next datagram and its descriptors (close-on-exec; the caller closes them).

    SessionClosed at the peer's hang-up and for whatever is no such message: too long, not decodable, more
    descriptors than max_descriptors (0: the kernel throws them away). BlockingIOError and TimeoutError as
    the socket is set.
    """
    try:
        data, descriptors, flags = _receive(connection, max_descriptors)
    except ConnectionResetError:
        raise SessionClosed("the other end of the session is gone") from None
    try:
        return _decoded(data, flags, decoder), descriptors
    except SessionClosed:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _decoded(data: bytes, flags: int, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    if not data:
        raise SessionClosed("the other end closed the session")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise SessionClosed("a datagram longer than the protocol allows")
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError:
        raise SessionClosed("a datagram that is no message of this protocol") from None


def _receive(connection: socket.socket, max_descriptors: int) -> tuple[bytes, list[int], int]:
    ancillary_bytes = socket.CMSG_LEN(4 * max_descriptors) if max_descriptors else 0
    data, ancillary, flags, _ = connection.recvmsg(DATAGRAM_BYTES, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += memoryview(payload[: len(payload) // 4 * 4]).cast("i").tolist()
    return data, descriptors, flags
