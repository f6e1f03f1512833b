"""What a reader on the same host uses: connect to the daemon, encode, attach handles as views.

    with connect("/run/encoderd/attach.sock") as session, session.encode(jpeg_bytes) as view:
        rows = view.numpy()

Needs no torch and no web server. A session may be shared by threads; it does not survive a fork.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from shm.encode_call import EncodeAnswer, EncodeRefused, Item, items_of, post_encode
from shm.encode_request import Media, pack_request
from shm.encode_ring import EncodeRing
from shm.errors import LeaseRefused, SessionClosed, StaleHandle
from shm.layout import (
    LAYOUT_VERSION,
    Dtype,
    RegionKind,
    SessionCompletion,
    SessionWait,
)
from shm.mapped_segments import MappedSegments
from shm.messages import Attach, Attached, Granted, Handle, Refused, SegmentGrant, Welcome
from shm.pending_encode import PendingEncode
from shm.received_descriptors import ReceivedDescriptors
from shm.region import attach_region
from shm.session import MAX_DESCRIPTORS, recv_datagram, send_datagram
from shm.submission_ring import SubmissionRing
from shm.view import View, leased_header

__all__ = ["EncodeAnswer", "EncodeRefused", "PendingEncode", "Session", "View", "connect"]

DEFAULT_PATH: Final = "/run/encoderd/attach.sock"
_WELCOME_OWN_DESCRIPTORS: Final = 3  # client region, control region, bell; then one per segment
_GREETINGS: Final = msgspec.msgpack.Decoder(Welcome | Refused)
_ANSWERS: Final = msgspec.msgpack.Decoder(Attached | Refused | Granted)


class SessionStatistics(NamedTuple):
    """A look inside a session. leases: attached and not ended; releases_waiting: the ring was full.

    encodes: under way over the rings, given up ones included until the daemon has dropped them.
    """

    leases: int
    segments: int
    releases_waiting: int
    encodes: int


def connect(path: str = DEFAULT_PATH, *, timeout: float = 5.0) -> "Session":
    """Open a session with the daemon behind its attach socket; every segment is mapped before this returns.

    timeout: seconds for the daemon to answer, here and in attach. SessionClosed if there is no daemon, if it
    refuses this user, or if it speaks another layout.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as undo:
        undo.callback(connection.close)
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            greeting, descriptors = recv_datagram(connection, _GREETINGS, MAX_DESCRIPTORS)
        except OSError as error:
            raise SessionClosed(f"no daemon at {path} ({type(error).__name__})") from None
        with ReceivedDescriptors(descriptors) as received:
            if isinstance(greeting, Refused):
                raise SessionClosed(f"the daemon refuses this session ({greeting.reason})")
            if greeting.layout_version != LAYOUT_VERSION:
                raise SessionClosed(
                    f"the daemon speaks layout {greeting.layout_version}, not {LAYOUT_VERSION}"
                )
            _set_timeout(connection, timeout)
            session = Session(connection, greeting, received)
        undo.pop_all()
    return session


class Session:
    """A connection to the daemon. When it closes, in whatever way, the daemon ends all its leases.

    Made by connect(). Close it, or use `with`: its views are released then, and arrays taken from them stay
    mapped but are not valid any more.
    """

    def __init__(self, connection: socket.socket, welcome: Welcome, received: ReceivedDescriptors) -> None:
        self._connection = connection
        self._welcome = welcome
        self._check_daemon = partial(_check_alive, connection)
        self._lock = threading.Lock()  # one question and its answer on the socket at a time
        self._closed = False
        self._views: weakref.WeakSet[View] = weakref.WeakSet()
        self._segments = MappedSegments(welcome.boot_id)
        with ExitStack() as undo:
            self._submissions, self._encodes = self._attach_rings(received)
            undo.callback(self._submissions.close)
            undo.callback(self._encodes.close)
            undo.callback(self._segments.close)
            for grant in welcome.segments:
                self._segments.add(grant, received)
            undo.pop_all()

    def attach(self, handle: Handle | Mapping[str, Any]) -> View:
        """Turn a handle (as encode or POST /encode gave it) into a view under a lease of this session.

        StaleHandle: the lease has ended, or the handle is not from this daemon. LeaseRefused: this session
        holds its share; release something. EncodeFailed, WorkerLost: the block failed meanwhile.
        SessionClosed: the daemon is gone or does not answer.
        """
        known = handle if isinstance(handle, Handle) else _parsed(handle)
        if known.boot_id != self._welcome.boot_id:
            raise StaleHandle("the handle is from another run of the daemon")
        self._submissions.flush()
        with self._lock:
            lease = self._ask(known).lease
            self._submissions.begin(lease)
            try:
                view = self._view(known, lease)
            except BaseException:
                self._submissions.end(lease)
                raise
            self._views.add(view)
        return view

    def release(self, view: View) -> None:
        """End a view's lease now. The same as view.release()."""
        view.release()

    def encode(
        self,
        mm_items: Item | Sequence[Item],
        *,
        modality: str = "image",
        req_id: str | None = None,
        wait: Literal["ready", "shape"] = "ready",
        timeout: float = 180.0,
        **fields: Any,
    ) -> View:
        """Encode one item or a list of items, and map the rows: a view under a lease of this session.

        bytes go over the session's own rings: written once, into memory that the daemon copies from. Texts
        (URLs, data URLs, base64, paths) and dicts, alone or among bytes, go to POST /encode where the daemon
        serves HTTP, and so does a request with `fields`: further fields of that request, sent as they are.
        Many threads may encode over one session at once; `submit` has many under way from one thread.

        modality: image, video or audio. req_id: requests with the same one, for the same items, at the same
        time, share one encode. wait: "shape" returns as soon as the sizes are known; then View.wait_rows and
        wait_ready wait for the rows. timeout: seconds, after which the encode is cancelled.
        EncodeRefused with the status and the message that HTTP would have given, WaitTimeout, LeaseRefused,
        EncodeFailed, WorkerLost, SessionClosed.
        """
        if self._closed:
            raise SessionClosed("this session is closed")
        items = items_of(mm_items)
        media = [item for item in items if isinstance(item, bytes | bytearray | memoryview)]
        if len(media) == len(items) and not fields and self._welcome.input_bytes:
            return self._submit(media, modality, req_id, wait, timeout).result()
        result = post_encode(
            self._welcome.http,
            items,
            modality=modality,
            req_id=req_id,
            wait=wait,
            timeout=timeout,
            fields=fields,
        )
        return self.attach(result.handle)

    def submit(
        self,
        mm_items: Media | Sequence[Media],
        *,
        modality: str = "image",
        req_id: str | None = None,
        wait: Literal["ready", "shape"] = "ready",
        timeout: float = 180.0,
    ) -> PendingEncode:
        """As encode, for bytes only, without waiting for the answer: one thread may have up to 256 under way.

        Everything that encode raises once the request is sent, result() raises. Until a result is taken, or
        the encode is cancelled or forgotten, its lease counts towards this session's share.
        EncodeRefused (too large), WaitTimeout (256 under way all the time), SessionClosed.
        """
        if self._closed:
            raise SessionClosed("this session is closed")
        media = [mm_items] if isinstance(mm_items, bytes | bytearray | memoryview) else mm_items
        return self._submit(media, modality, req_id, wait, timeout)

    @property
    def boot_id(self) -> str:
        """Which run of the daemon this is: hexadecimal, new at each start."""
        return self._welcome.boot_id

    def statistics(self) -> SessionStatistics:
        """A look inside."""
        return SessionStatistics(
            self._submissions.live(),
            len(self._segments),
            self._submissions.waiting(),
            self._encodes.under_way(),
        )

    def close(self) -> None:
        """Release every view and end the session. The second time nothing happens."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._encodes.close()
        for view in list(self._views):
            view.release()
        self._submissions.close()
        self._segments.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self,
        media: Sequence[Media],
        modality: str,
        req_id: str | None,
        wait: Literal["ready", "shape"],
        timeout: float,
    ) -> PendingEncode:
        request = pack_request(media, modality.lower(), req_id or "")
        when = SessionWait.SHAPE if wait == "shape" else SessionWait.READY
        return PendingEncode(self._encodes, self._encodes.begin(request, when, timeout), self._view_of_answer)

    def _view_of_answer(self, answer: SessionCompletion) -> View:
        handle = self._handle(answer)
        self._submissions.begin(answer.lease)
        try:
            with self._lock:
                while not self._segments.has(handle.segment, handle.epoch):
                    # Its descriptor was sent before the answer, so it is in the socket.
                    self._map_granted(*self._receive())
                view = self._view(handle, answer.lease)
                self._views.add(view)
        except BaseException:
            self._submissions.end(answer.lease)
            raise
        return view

    def _handle(self, answer: SessionCompletion) -> Handle:
        return Handle(
            self._welcome.boot_id,
            answer.segment,
            answer.epoch,
            answer.block,
            answer.generation,
            answer.offset,
            answer.nbytes,
            answer.rows,
            answer.dim,
            Dtype(answer.dtype).label,
            nonce="",
        )

    def _view(self, handle: Handle, lease: int) -> View:
        """The leased block, mapped and checked against the handle."""
        reader = self._segments.reader(handle.segment, handle.epoch)
        return View(
            handle,
            reader,
            leased_header(reader, handle),
            end_lease=partial(self._submissions.end, lease),
            check_daemon=self._check_daemon,
        )

    def _ask(self, handle: Handle) -> Attached:
        """One attach on the socket, and the segment mapped if it is new. Holds the lock."""
        if self._closed:
            raise SessionClosed("this session is closed")
        question = Attach(handle.nonce, handle.segment, handle.epoch, handle.block, handle.generation)
        try:
            send_datagram(self._connection, question, [])
        except (OverflowError, ValueError):
            raise StaleHandle("a handle with numbers or a nonce that no daemon gives out") from None
        except OSError as error:
            raise SessionClosed(f"the session is broken ({type(error).__name__})") from None
        answer, descriptors = self._receive()
        while isinstance(answer, Granted):  # of an encode that another thread waits for
            self._map_granted(answer, descriptors)
            answer, descriptors = self._receive()
        if isinstance(answer, Attached) and answer.grant is None and not descriptors:
            return answer
        with ReceivedDescriptors(descriptors) as received:
            if isinstance(answer, Refused):
                raise _refused(answer.reason)
            if answer.grant is not None:
                self._map_segment(answer.grant, received)
        return answer

    def _receive(self) -> tuple[Attached | Refused | Granted, list[int]]:
        """The daemon's next datagram. Holds the lock."""
        if self._closed:
            raise SessionClosed("this session is closed")
        try:
            return recv_datagram(self._connection, _ANSWERS, 1)
        except BlockingIOError:  # the timeout, see _set_timeout
            # A late answer would be taken for the next question's: this conversation is over.
            self._connection.shutdown(socket.SHUT_RDWR)
            raise SessionClosed("the daemon did not answer in time") from None
        except OSError as error:
            raise SessionClosed(f"the session is broken ({type(error).__name__})") from None

    def _map_granted(self, granted: Attached | Refused | Granted, descriptors: list[int]) -> None:
        """A segment that came unasked. Holds the lock."""
        with ReceivedDescriptors(descriptors) as received:
            if not isinstance(granted, Granted):
                raise SessionClosed("the daemon answers what nobody asked")
            self._map_segment(granted.grant, received)

    def _map_segment(self, grant: SegmentGrant, received: ReceivedDescriptors) -> None:
        """A new one, and room for it made first. Holds the lock."""
        self._segments.drop_abandoned(
            {(view.handle.segment, view.handle.epoch) for view in list(self._views) if not view.released}
        )
        self._segments.add(grant, received)

    def _attach_rings(self, received: ReceivedDescriptors) -> tuple[SubmissionRing, EncodeRing]:
        """The rings behind Welcome's first three descriptors."""
        with ExitStack() as undo:
            client = attach_region(received.take(), RegionKind.SESSION_CLIENT, writable=True)
            undo.enter_context(client)
            control = attach_region(received.take(), RegionKind.SESSION_CONTROL, writable=False)
            undo.enter_context(control)
            bell = received.take()
            undo.callback(os.close, bell)
            submissions = SubmissionRing(client, control, bell, self._connection)
            encodes = EncodeRing(
                submissions, client, control, self._welcome.input_bytes, self._check_daemon, submissions.end
            )
            undo.pop_all()
        return submissions, encodes


def _parsed(handle: Mapping[str, Any]) -> Handle:
    try:
        return msgspec.convert(handle, Handle)
    except msgspec.ValidationError as error:
        raise StaleHandle(f"not a handle: {error}") from None


def _set_timeout(connection: socket.socket, timeout: float) -> None:
    """Let the kernel count the time: Python's own timeout costs a poll() before every call."""
    seconds, fraction = divmod(timeout, 1)
    timeval = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _refused(reason: str) -> Exception:
    if reason == "stale":
        return StaleHandle("the lease has ended")
    if reason == "cap":
        return LeaseRefused("this session holds its share of leased bytes; release a view first")
    return SessionClosed(f"the daemon refuses ({reason})")


def _check_alive(connection: socket.socket) -> None:
    """SessionClosed if the daemon's end of the socket is gone."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # closed here, by Session.close: its views are released already
        poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        raise SessionClosed("the daemon is gone")
