"""Readers' sessions: who may map segments, and which leases they hold.

One session is one connection to the attach socket. Encodes that come over its ring are
`app.session_encodes`'s. What a reader sends, by datagram or through its ring, is
untrusted: copied once, checked, and at worst it costs that session. The kernel's hang-up is the proof of a
reader's death and ends all its leases.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec

from app.leases import Holder, Lease, Leases
from app.session_encodes import SessionEncodes
from app.session_request import EncodePath
from shm.errors import LeaseRefused, RegionCorrupt, RegionUnavailable, SessionClosed, StaleHandle
from shm.layout import LAYOUT_VERSION, SessionDescriptor, SessionKind
from shm.messages import Attach, Attached, Granted, Refused, Welcome
from shm.session import (
    MAX_DESCRIPTORS,
    SessionRegions,
    create_session_regions,
    peer_credentials,
    recv_datagram,
    send_datagram,
)

if TYPE_CHECKING:
    from app.segments import Block, Segments

SESSIONS_MAX = 1024
ACCEPT_PAUSE_S = 1.0
DRAIN_MAX = 64  # descriptors taken before the event loop has its turn again
ENCODE_WEIGHT = 4  # an encode counts for so many of them

logger = logging.getLogger(__name__)
_requests = msgspec.msgpack.Decoder(Attach)


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """sessions: open now; encoding: their requests under way. The others count since the start."""

    sessions: int
    refused: int
    attached: int
    encoding: int = 0
    encodes: int = 0


class Session:
    """One reader. on_end(session) is called once, when it is over for whatever reason."""

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        regions: SessionRegions,
        leases: Leases,
        segments: Segments,
        encodes: EncodePath,
        on_end: Callable[[Session], None],
    ) -> None:
        self.number = number
        self.attached = 0
        self.encodes = SessionEncodes(encodes, number, regions, self._lease_for_encode, self._abort)
        self._input_bytes = encodes.limits.input_bytes
        self._connection = connection
        self._regions = regions
        self._leases = leases
        self._segments = segments
        self._on_end = on_end
        self._holder = Holder(peer_credentials(connection).pid)
        self._granted: set[tuple[int, int]] = set()  # by key: a segment that is gone must not be kept here
        self._loop = asyncio.get_running_loop()
        self._is_open = True

    def welcome(self, boot_id: bytes, http: str) -> None:
        """Send the regions and all segments, and listen from now on."""
        room = MAX_DESCRIPTORS - len(self._regions.descriptors)
        segments = list(islice(self._segments.readable(), room))
        self._granted.update(segment.key for segment in segments)
        welcome = Welcome(
            self.number,
            LAYOUT_VERSION,
            boot_id.hex(),
            http,
            [segment.grant for segment in segments],
            self._input_bytes,
        )
        descriptors = self._regions.descriptors + [segment.read_only_fd for segment in segments]
        self._loop.add_reader(self._connection, self._answer_datagram)
        self._loop.add_reader(self._regions.bell, self._answer_bell)
        self._send(welcome, descriptors)
        self._drain()

    def end(self) -> None:
        """Hang up; its leases end."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._connection)
        self._loop.remove_reader(self._regions.bell)
        self._connection.close()
        self.encodes.close()
        self._regions.close()
        self._leases.end_holder(self._holder)
        self._on_end(self)

    def _answer_datagram(self) -> None:
        """One request, or the hang-up. The loop calls again if there is more."""
        try:
            request, _ = recv_datagram(self._connection, _requests, max_descriptors=0)
        except BlockingIOError:
            return
        except (SessionClosed, OSError):
            self.end()
            return
        self._attach(request)

    def _attach(self, request: Attach) -> None:
        try:
            lease = self._leases.attach(self._holder, request)
        except StaleHandle:
            self._send(Refused("stale"), [])
            return
        except LeaseRefused:
            self._send(Refused("cap"), [])
            return
        self.attached += 1
        segment = lease.block.segment
        if segment.key in self._granted:
            self._send(Attached(lease.number), [])
        else:
            self._granted.add(segment.key)
            self._send(Attached(lease.number, segment.grant), [segment.read_only_fd])

    def _lease_for_encode(self, block: Block) -> Lease:
        """A lease of this session's, whose segment its client has, or finds in its socket. LeaseRefused."""
        lease = self._leases.grant_held(self._holder, block)
        segment = block.segment
        if segment.key not in self._granted:
            self._granted.add(segment.key)
            try:
                send_datagram(self._connection, Granted(segment.grant), [segment.read_only_fd])
            except (BlockingIOError, SessionClosed, OSError):
                self._abort("it does not take its datagrams")
        return lease

    def _abort(self, reason: str) -> None:
        """End soon: the caller is in the middle of something that the end would change."""
        logger.warning("session %d ends: %s", self.number, reason)
        self._loop.call_soon(self.end)

    def _send(self, message: msgspec.Struct, descriptors: list[int]) -> None:
        """A reader that does not take its answers, or is gone, has had its session."""
        try:
            send_datagram(self._connection, message, descriptors)
        except (BlockingIOError, SessionClosed, OSError) as error:
            logger.info("session %d ends: it does not take its answers (%s)", self.number, error)
            self.end()

    def _answer_bell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._regions.bell)
        if self._is_open:
            # The client cannot: it would ring for everything that it says until the drain is done.
            self._regions.submissions.disarm()
        self._drain()

    def _drain(self) -> None:
        """Take up to DRAIN_MAX descriptors; then sleep, armed, or have another turn soon."""
        if not self._is_open:
            return
        try:
            if self._take(DRAIN_MAX) or not self._regions.submissions.arm():
                self._loop.call_soon(self._drain)
        except RegionCorrupt as corrupt:
            logger.warning("session %d ends: %s", self.number, corrupt)
            self.end()

    def _take(self, limit: int) -> bool:
        """Whether the limit was reached."""
        while limit > 0:
            slots = self._regions.submissions.take_many(-(-limit // ENCODE_WEIGHT), 0)
            if not slots:
                return False
            for descriptor in SessionDescriptor.unpack_many(slots):
                limit -= self._obey(descriptor)
        return True

    def _obey(self, descriptor: SessionDescriptor) -> int:
        """Do it; what it weighs."""
        kind = descriptor.kind
        if kind == SessionKind.RELEASE:
            # One that is not this session's is ignored.
            self._leases.release_held(self._holder, descriptor.lease)
        elif kind == SessionKind.ENCODE:
            self.encodes.begin(descriptor)
            return ENCODE_WEIGHT
        elif kind == SessionKind.CANCEL:
            self.encodes.cancel(descriptor.request)
        else:
            raise RegionCorrupt(f"unknown session descriptor kind {kind}")
        return 1


class Sessions:
    """Accepts readers on the attach socket, and keeps their sessions until they hang up."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        boot_id: bytes,
        http: str,
        allow_uids: frozenset[int],
        leases: Leases,
        segments: Segments,
        encodes: EncodePath,
    ) -> None:
        """http: where HTTP is served, "unix:/path" or "host:port". allow_uids: who may connect."""
        self._listener = listener
        self._boot_id = boot_id
        self._http = http
        self._allow_uids = allow_uids
        self._leases = leases
        self._segments = segments
        self._encodes = encodes
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._numbers = count(1)
        self._open: set[Session] = set()
        self._refused = 0
        self._attached_before = 0
        self._encodes_before = 0

    def start(self) -> None:
        """Accept from now on."""
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more, and hang up on everybody."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        for session in list(self._open):
            session.end()

    def statistics(self) -> SessionStatistics:
        """Counts, now."""
        attached = self._attached_before + sum(session.attached for session in self._open)
        encodes = self._encodes_before + sum(session.encodes.begun for session in self._open)
        encoding = sum(session.encodes.under_way for session in self._open)
        return SessionStatistics(len(self._open), self._refused, attached, encoding, encodes)

    def _accept(self) -> None:
        """One connection; the loop calls again if more wait."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause_accepting(error)
            return
        connection.setblocking(False)
        peer = peer_credentials(connection)
        if peer.uid not in self._allow_uids or len(self._open) >= SESSIONS_MAX:
            self._refuse(connection, f"pid {peer.pid} of uid {peer.uid}")
            return
        try:
            number = next(self._numbers)
            regions = create_session_regions(self._boot_id, number, self._encodes.limits.input_bytes)
        except (RegionUnavailable, OSError) as error:
            self._refuse(connection, str(error))
            return
        session = Session(
            number, connection, regions, self._leases, self._segments, self._encodes, self._forget
        )
        self._open.add(session)
        session.welcome(self._boot_id, self._http)

    def _pause_accepting(self, error: OSError) -> None:
        """No descriptor is left for a connection: come back later, instead of asking in circles."""
        logger.warning("no session can be accepted now: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self.start)

    def _refuse(self, connection: socket.socket, who: str) -> None:
        self._refused += 1
        logger.warning("a session was refused: %s", who)
        with connection, suppress(BlockingIOError, SessionClosed, OSError):
            send_datagram(connection, Refused("protocol"), [])

    def _forget(self, session: Session) -> None:
        self._open.discard(session)
        self._attached_before += session.attached
        self._encodes_before += session.encodes.begun
