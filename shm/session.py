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
from shm.errors import RegionCorrupt, SessionClosed
from shm.layout import (
    SESSION_COMPLETION_CONSUMER_OFFSET,
    SESSION_COMPLETION_PRODUCER_OFFSET,
    SESSION_CONTROL_BYTES,
    SESSION_FAULT_BYTES,
    SESSION_INPUT_OFFSET,
    SESSION_REQUEST_SLOTS,
    SESSION_SIDE_OFFSET,
    SESSION_SLOT_COUNT,
    RegionKind,
    session_client_bytes,
    session_fault_offset,
)
from shm.messages import SessionFault
from shm.region import Backing, Region, create_region, reopen_read_only, seal_against_writers, seal_size

DATAGRAM_BYTES: Final = 64 << 10
# SCM_MAX_FD: the kernel passes no more beside one datagram.
MAX_DESCRIPTORS: Final = 253
_CREDENTIALS: Final = struct.Struct("=iII")
# What may be said about a failed request beside its code; the rest is cut off.
_FAULT_MESSAGE_BYTES: Final = SESSION_FAULT_BYTES - 64

_PIECES_MAX: Final = 1024  # IOV_MAX

Message = TypeVar("Message")


class PeerCredentials(NamedTuple):
    """Who is at the other end of a Unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


class SessionRegions:
    """Control's hold on one session's two memfds and its bell; closing it ends the rings.

    client: written by the client, untrusted. control: written here. `descriptors` go into Welcome.
    submissions: releases, encodes and cancels from the client; completions: answers to encodes.
    """

    def __init__(self, client: Region, control: Region, control_read_only_fd: int, bell: int) -> None:
        self.client = client
        self.control = control
        self.control_read_only_fd = control_read_only_fd
        self.bell = bell
        self.submissions = _core.Consumer(
            client.memory, SESSION_SIDE_OFFSET, control.memory, SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT
        )
        # A futex bell on the client's own word: exchanged, never believed.
        self.completions = _core.Producer(
            control.memory,
            SESSION_COMPLETION_PRODUCER_OFFSET,
            client.memory,
            SESSION_COMPLETION_CONSUMER_OFFSET,
            SESSION_REQUEST_SLOTS,
        )

    @property
    def input_fd(self) -> int:
        """Where read_run finds the client's input region."""
        return self.client.fd

    def store_fault(self, request: int, fault: SessionFault) -> int:
        """Leave the words for a request that is about to be answered FAILED; how many bytes they are."""
        run = msgspec.msgpack.encode(fault)
        if len(run) > SESSION_FAULT_BYTES:
            cut = fault.message.encode()[:_FAULT_MESSAGE_BYTES].decode(errors="ignore")
            run = msgspec.msgpack.encode(SessionFault(fault.code, cut))
        offset = session_fault_offset(request)
        self.control.view[offset : offset + len(run)] = run
        return len(run)

    @property
    def descriptors(self) -> list[int]:
        """What Welcome carries before the segments: client region, control region read-only, bell."""
        return [self.client.fd, self.control_read_only_fd, self.bell]

    def close(self) -> None:
        """Give everything back. `submissions` refuses to be used afterwards."""
        self.submissions.close()
        self.completions.close()
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


def create_session_regions(boot_id: bytes, session: int, input_bytes: int = 0) -> SessionRegions:
    """Two new memfds and an eventfd for one session. RegionUnavailable.

    input_bytes: the client's input region, whose pages come as the client writes them. Control reads it with
    read() only: a hole there is zeros, where a mapping would make control pay for the page, or die of it.

    The client's is sealed SHRINK|GROW|SEAL: a reader that could shrink it would kill control by SIGBUS.
    Control's is sealed against every new writer, so that its read-only descriptor stays read-only.
    """
    with ExitStack() as undo:
        client = undo.enter_context(
            create_region(
                RegionKind.SESSION_CLIENT,
                session_client_bytes(input_bytes),
                boot_id=boot_id,
                place=session,
                capacity=SESSION_SLOT_COUNT,
                payload_offset=SESSION_INPUT_OFFSET,
                reserve_bytes=SESSION_INPUT_OFFSET,
                backing=Backing.MEMFD,
                label="session-client",
            )
        )
        seal_size(client.fd)
        control = undo.enter_context(
            create_region(
                RegionKind.SESSION_CONTROL,
                SESSION_CONTROL_BYTES,
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


def read_run(input_fd: int, offset: int, target: memoryview) -> None:
    """Copy a run of the client's input region, once, whatever the client does to it meanwhile.

    offset: from the input region's start; the caller has checked the range. Releases the interpreter lock.
    RegionCorrupt if the region ends before the run does, OSError if it cannot be read.
    """
    copied = 0
    while copied < len(target):
        # read() stops after 2 GiB.
        nbytes = os.preadv(input_fd, [target[copied:]], SESSION_INPUT_OFFSET + offset + copied)
        if nbytes == 0:
            raise RegionCorrupt("an input region ends before its run does")
        copied += nbytes


def write_run(input_fd: int, offset: int, pieces: list[bytes | bytearray | memoryview]) -> None:
    """The client's side of read_run: the pieces one behind the other, written once.

    OSError if the kernel has no memory for it.
    """
    position = SESSION_INPUT_OFFSET + offset
    for start in range(0, len(pieces), _PIECES_MAX):
        position += _write_all(input_fd, pieces[start : start + _PIECES_MAX], position)


def _write_all(input_fd: int, pieces: list[bytes | bytearray | memoryview], position: int) -> int:
    nbytes = sum(map(len, pieces))
    written = os.pwritev(input_fd, pieces, position)
    if written < nbytes:  # more than 2 GiB at once, or a signal
        rest = memoryview(b"".join(pieces))
        while written < nbytes:
            written += os.pwrite(input_fd, rest[written:], position + written)
    return nbytes


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
