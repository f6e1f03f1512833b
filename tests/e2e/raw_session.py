"""The attach protocol spoken by hand: what a hostile or curious client can do with the socket alone.

Also the tests' own eyes: it maps the segments read-only and reads block headers by the published layout,
so that "all pages are free" is seen in the memory itself and not believed from a statistic.
"""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import dataclass
from typing import Self

import msgspec

from shm import _core
from shm.layout import (
    BlockHeader,
    BlockState,
    RegionHeader,
    block_header_offset,
)
from shm.messages import Attach, Attached, Handle, Refused, SegmentGrant, Welcome

HANG_GUARD_NS = 120 * 1_000_000_000
MAX_DATAGRAM_BYTES = 65536
MAX_DESCRIPTORS = 64


@dataclass
class SegmentEye:
    """One segment, mapped read-only."""

    grant: SegmentGrant
    memory: mmap.mmap
    block_count: int

    @classmethod
    def map(cls, grant: SegmentGrant, descriptor: int) -> Self:
        """Map and close the descriptor."""
        try:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        return cls(grant, memory, RegionHeader.unpack(memory[:128]).capacity)

    def header(self, block: int) -> BlockHeader:
        """A consistent copy of one block's header."""
        return BlockHeader.unpack(_core.header_load(self.memory, block_header_offset(block)))

    def states(self) -> dict[BlockState, int]:
        """How many blocks are in each state."""
        counts: dict[BlockState, int] = {}
        for block in range(self.block_count):
            state = BlockState(self.header(block).state)
            counts[state] = counts.get(state, 0) + 1
        return counts

    def wait_state(self, block: int, *wanted: BlockState) -> BlockHeader:
        """Sleep on the block's futex until its state is one of these."""
        while (header := self.header(block)).state not in wanted:
            changed = _core.header_wait(
                self.memory, block_header_offset(block), header.change_seq, HANG_GUARD_NS
            )
            assert changed, f"block {block} stays {BlockState(header.state).name}"
        return header


class RawSession:
    """A session without shm.client. Context manager; descriptors and mappings are closed at exit."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(HANG_GUARD_NS / 1e9)
        self.socket.connect(path)
        message, descriptors = self._receive()
        assert isinstance(message, Welcome), message
        self.welcome = message
        self.client_fd, self.control_fd, self.bell_fd, *segment_fds = descriptors
        assert len(segment_fds) == len(message.segments)
        self.segments = [
            SegmentEye.map(grant, fd) for grant, fd in zip(message.segments, segment_fds, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session as a dying process would: the kernel closes everything."""
        self.socket.close()
        for descriptor in (self.client_fd, self.control_fd, self.bell_fd):
            os.close(descriptor)
        for segment in self.segments:
            segment.memory.close()

    def _receive(self) -> tuple[Welcome | Attached | Refused, list[int]]:
        data, descriptors, flags, _ = socket.recv_fds(self.socket, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS)
        if not data:
            raise ConnectionResetError("the daemon hung up")
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        return msgspec.msgpack.decode(data, type=Welcome | Attached | Refused), list(descriptors)

    def attach(self, handle: Handle) -> Attached | Refused:
        """Ask for a lease. A granted segment is mapped."""
        request = Attach(handle.nonce, handle.segment, handle.epoch, handle.block, handle.generation)
        self.socket.send(msgspec.msgpack.encode(request))
        answer, descriptors = self._receive()
        assert isinstance(answer, Attached | Refused), answer
        if isinstance(answer, Attached) and answer.grant is not None:
            self.segments.append(SegmentEye.map(answer.grant, descriptors[0]))
        return answer

    def segment_of(self, handle: Handle) -> SegmentEye:
        """The mapped segment in which the handle's block lies."""
        for segment in self.segments:
            if (segment.grant.index, segment.grant.epoch) == (handle.segment, handle.epoch):
                return segment
        raise AssertionError("the handle's segment was not granted")

    def hung_up(self) -> bool:
        """Block until the daemon says something; True if it closed the session."""
        try:
            return self.socket.recv(MAX_DATAGRAM_BYTES) == b""
        except ConnectionResetError:
            return True


def wait_all_free(attach_socket: str) -> None:
    """Block until every block of every segment that the daemon has is FREE."""
    with RawSession(attach_socket) as session:
        assert session.segments
        for segment in session.segments:
            for block in range(segment.block_count):
                segment.wait_state(block, BlockState.FREE)
