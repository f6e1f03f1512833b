"""The smallest daemon: a segment's writer and an attach socket in one process, driven by commands.

`python -m tests.bench.attach_server SOCKET SEGMENT_BYTES BACKING` reads one JSON command a line from stdin
and answers each with one line. Used by the tests of the client and by the hand-off benchmark, through
AttachServer in tests.bench.attach_process.
"""

import os
import secrets
import select
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from shm.errors import SessionClosed
from shm.layout import LAYOUT_VERSION, BlockHeader, Dtype, SessionDescriptor
from shm.messages import Attach, Attached, BlockMetadata, Handle, ItemRows, Refused, SegmentGrant, Welcome
from shm.region import Backing, Region, prefault, reopen_read_only, seal_against_writers
from shm.segment import FillingBlock, SegmentReader, SegmentRecovery, SegmentWriter, create_segment
from shm.session import SessionRegions, create_session_regions, recv_datagram, send_datagram


class Fill(msgspec.Struct, frozen=True, tag=True):
    """A new block with `publish` of its rows written and published. Answer: a Handle."""

    rows: int
    dim: int
    dtype: str
    seed: int
    publish: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """`count` more handles for the block that this handle names. Answer: the Handles."""

    handle: Handle
    count: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Write and publish the first `rows` rows."""

    handle: Handle
    rows: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Write and publish all rows; READY."""

    handle: Handle


class Fail(msgspec.Struct, frozen=True, tag=True):
    """FAILED."""

    handle: Handle


class LoseWorker(msgspec.Struct, frozen=True, tag=True):
    """As after the worker's death: FILLING becomes LOST; then a new segment. abandon: give the old one up."""

    abandon: bool


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Free the block. Answer: whether it was."""

    handle: Handle


class SetCap(msgspec.Struct, frozen=True, tag=True):
    """The most leased bytes that a session may hold."""

    nbytes: int


class AwaitLeases(msgspec.Struct, frozen=True, tag=True):
    """Answered once exactly `count` leases are attached."""

    count: int


class Stall(msgspec.Struct, frozen=True, tag=True):
    """Read no more attaches (stalled: true), or go on."""

    stalled: bool


_ATTACHES = msgspec.msgpack.Decoder(Attach)

Command = Fill | Grant | Publish | Ready | Fail | LoseWorker | Reclaim | SetCap | AwaitLeases | Stall


def expected_bytes(seed: int, rows: int, dim: int, dtype: Dtype) -> bytes:
    """What a block filled with this seed holds: finite numbers in every dtype, others for every seed."""
    count = rows * dim
    values = (
        np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503)
    ) >> np.uint32(8)
    if dtype is Dtype.FLOAT32:
        return values.astype(np.float32).tobytes()
    return (values & np.uint32(0x3BFF)).astype(np.uint16).tobytes()  # exponent bits never all set


class Promise(NamedTuple):
    """What a nonce gives a right to."""

    handle: Handle
    segment: Region


class Connection:
    """One session: its socket, its regions, the bytes of each lease, the segments it has."""

    def __init__(self, peer: socket.socket, regions: SessionRegions) -> None:
        self.peer = peer
        self.regions = regions
        self.leases: dict[int, int] = {}
        self.segments: set[tuple[int, int]] = set()


class Server:
    """Control and worker in one; one thread, driven by its epoll."""

    def __init__(self, path: str, segment_bytes: int, backing: Backing) -> None:
        self._boot_id = secrets.token_bytes(16)
        self._segment_bytes = segment_bytes
        self._backing = backing
        self._path = path
        self._epoch = 0
        self._connections: list[Connection] = []
        self._promises: dict[str, Promise] = {}
        self._filling: dict[int, tuple[FillingBlock, int]] = {}
        self._awaited: list[int] = []
        self._cap_bytes = sys.maxsize
        self._next_lease = 1
        self._stalled = False
        self._ended = False
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._new_segment()

    def run(self) -> None:
        """Until stdin ends."""
        self._watch(self._listener.fileno(), self._accept)
        self._watch(sys.stdin.fileno(), self._obey)
        self._answer("listening")
        while not self._ended:
            for fd, _ in self._epoll.poll():
                if fd in self._handlers:  # it may have gone in this very round
                    self._handlers[fd]()
            if self._awaited:
                self._answer_awaited()

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def _forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._handlers[fd]

    def _answer(self, value: object) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()

    # --- the attach socket ---

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        regions = create_session_regions(self._boot_id, len(self._connections))
        connection = Connection(peer, regions)
        self._connections.append(connection)
        grant = self._grant_segment(connection)
        welcome = Welcome(
            len(self._connections), LAYOUT_VERSION, self._boot_id.hex(), f"unix:{self._path}.http", [grant]
        )
        send_datagram(peer, welcome, [*regions.descriptors, self._read_only_fd])
        regions.submissions.arm()
        self._watch(peer.fileno(), partial(self._attach, connection))
        self._watch(regions.bell, partial(self._releases, connection))

    def _attach(self, connection: Connection) -> None:
        if self._stalled:
            return
        try:
            question, _ = recv_datagram(connection.peer, _ATTACHES, 0)
            self._answer_attach(connection, question)
        except SessionClosed:
            self._hang_up(connection)

    def _answer_attach(self, connection: Connection, question: Attach) -> None:
        promise = self._promises.get(question.nonce)
        if promise is None or question != _question(promise.handle):
            send_datagram(connection.peer, Refused("stale"), [])
            return
        if connection.leases and sum(connection.leases.values()) + promise.handle.nbytes > self._cap_bytes:
            send_datagram(connection.peer, Refused("cap"), [])
            return
        del self._promises[question.nonce]
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        connection.leases[lease] = promise.handle.nbytes
        if (0, question.epoch) in connection.segments:
            send_datagram(connection.peer, Attached(lease), [])
        else:
            grant = self._grant_segment(connection)
            send_datagram(connection.peer, Attached(lease, grant), [self._read_only_fd])

    def _releases(self, connection: Connection) -> None:
        os.eventfd_read(connection.regions.bell)
        releases = connection.regions.submissions
        while True:
            while (slot := releases.try_take()) is not None:
                connection.leases.pop(SessionDescriptor.unpack(slot).lease, None)
            if releases.arm():
                return

    def _hang_up(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._forget(connection.peer.fileno())
        self._forget(connection.regions.bell)
        connection.peer.close()
        connection.regions.close()

    def _grant_segment(self, connection: Connection) -> SegmentGrant:
        connection.segments.add((0, self._epoch))
        return SegmentGrant(0, self._epoch, self._segment_bytes)

    # --- commands ---

    def _obey(self) -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            self._ended = True
            return
        command = msgspec.json.decode(line, type=Command)
        if isinstance(command, AwaitLeases):
            self._awaited.append(command.count)
        else:
            self._answer(self._carry_out(command))

    def _carry_out(self, command: Command) -> object:
        match command:
            case Fill():
                return self._fill(command)
            case Grant(handle, count):
                return [self._promise(handle) for _ in range(count)]
            case Publish(handle, rows):
                self._write(handle.block, rows)
            case Ready(handle):
                self._write(handle.block, handle.rows)
                self._filling.pop(handle.block)[0].ready()
            case Fail(handle):
                self._filling.pop(handle.block)[0].fail()
            case Reclaim(handle):
                return self._writer.reclaim(handle.block, handle.generation)
            case LoseWorker(abandon):
                self._lose_worker(abandon)
            case SetCap(nbytes):
                self._cap_bytes = nbytes
            case Stall(stalled):
                self._stalled = stalled
        return "done"

    def _fill(self, command: Fill) -> Handle:
        dtype = Dtype[command.dtype.upper()]
        nbytes = command.rows * command.dim * dtype.itemsize
        metadata = BlockMetadata("image", [ItemRows(0, command.rows, [[1, command.rows, 1]], 1, 1)])
        block = self._writer.allocate(
            nbytes, command.rows, command.dim, dtype, msgspec.msgpack.encode(metadata)
        )
        if block is None:
            raise MemoryError("the test's segment is full")
        self._filling[block.block] = (block, command.seed)
        self._write(block.block, command.publish)
        header = SegmentReader(self._segment).header(block.block)
        return self._promise(self._handle(block.block, header))

    def _write(self, block_index: int, rows: int) -> None:
        block, seed = self._filling[block_index]
        end = rows * block.dim * block.dtype.itemsize
        block.payload[:end] = expected_bytes(seed, rows, block.dim, block.dtype)
        block.publish_rows(rows)

    def _handle(self, block: int, header: BlockHeader) -> Handle:
        return Handle(
            self._boot_id.hex(), 0, self._epoch, block, header.generation, header.offset, header.nbytes,
            header.rows, header.dim, Dtype(header.dtype).label, "", self._path,
        )  # fmt: skip

    def _promise(self, handle: Handle) -> Handle:
        promised = msgspec.structs.replace(handle, nonce=secrets.token_hex(16))
        self._promises[promised.nonce] = Promise(promised, self._segment)
        return promised

    def _lose_worker(self, abandon: bool) -> None:
        recovery = SegmentRecovery(self._segment)
        recovery.fail_filling()
        if abandon:
            recovery.abandon()
        self._filling.clear()
        self._new_segment()

    def _new_segment(self) -> None:
        self._epoch += 1
        self._segment = create_segment(
            self._segment_bytes, boot_id=self._boot_id, place=0, epoch=self._epoch, backing=self._backing
        )
        prefault(self._segment, write=True)
        if self._backing is Backing.MEMFD:
            seal_against_writers(self._segment.fd)
        self._read_only_fd = reopen_read_only(self._segment.fd)
        self._writer = SegmentWriter(self._segment)

    def _answer_awaited(self) -> None:
        leases = sum(len(connection.leases) for connection in self._connections)
        while self._awaited and self._awaited[0] == leases:
            self._answer(self._awaited.pop(0))


def _question(handle: Handle) -> Attach:
    return Attach(handle.nonce, handle.segment, handle.epoch, handle.block, handle.generation)


if __name__ == "__main__":
    Server(sys.argv[1], int(sys.argv[2]), Backing(sys.argv[3])).run()
