"""The client's end of encodes that go over a session's own rings: no HTTP, no JSON, no base64.

Each Session has one, used by all its threads at once. It has no thread of its own: among those who wait, one
leads, sleeps on the completion ring, and hands the others their answers. Once it has its own, the next leads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from shm import _core
from shm.encode_call import EncodeRefused
from shm.encode_request import Request
from shm.errors import LeaseRefused, RegionCorrupt, SessionClosed, WaitTimeout
from shm.input_pages import InputPages
from shm.layout import (
    SESSION_COMPLETION_CONSUMER_OFFSET,
    SESSION_COMPLETION_PRODUCER_OFFSET,
    SESSION_FAULT_BYTES,
    SESSION_REQUEST_SLOTS,
    SessionAnswer,
    SessionCompletion,
    SessionDescriptor,
    SessionKind,
    SessionWait,
    session_fault_offset,
)
from shm.messages import SessionFault
from shm.region import Region
from shm.submission_ring import SubmissionRing

# A daemon that dies closes its socket but wakes no futex: so often the leader looks at the socket.
_SLICE_NS: Final = 1_000_000_000
_TAKE_MAX: Final = 64  # answers taken together
_decode_fault = msgspec.msgpack.Decoder(SessionFault).decode


class _NotSent(Exception):
    """The daemon never hears of this request."""

    def __init__(self, reason: EncodeRefused) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Call:
    """One request under way. Its fields change under the ring's lock only."""

    __slots__ = ("abandoned", "answer", "bell", "deadline_ns", "fault", "nbytes", "number", "offset", "rung")

    def __init__(self, number: int, offset: int, nbytes: int, deadline_ns: int) -> None:
        self.number = number
        self.offset = offset
        self.nbytes = nbytes
        self.deadline_ns = deadline_ns
        self.answer: SessionCompletion | None = None
        self.fault: SessionFault | None = None
        self.abandoned = False
        self.bell: threading.Lock | None = None  # held; released once to wake the thread that waits
        self.rung = False


class EncodeRing:
    """Owns the completion ring's consuming end, the request slots and the input pages.

    submissions: where descriptors go; client, control: the session's regions, the session's owner closes
    them after this. check_daemon raises SessionClosed when the daemon is gone. end_lease takes the number of
    a lease that nobody waits for any more.
    """

    def __init__(
        self,
        submissions: SubmissionRing,
        client: Region,
        control: Region,
        input_bytes: int,
        check_daemon: Callable[[], None],
        end_lease: Callable[[int], None],
    ) -> None:
        self._submissions = submissions
        self._control = control
        self._check_daemon = check_daemon
        self._end_lease = end_lease
        self._completions = _core.Consumer(
            control.memory,
            SESSION_COMPLETION_PRODUCER_OFFSET,
            client.memory,
            SESSION_COMPLETION_CONSUMER_OFFSET,
            SESSION_REQUEST_SLOTS,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # room, leadership
        self._pages = InputPages(client, input_bytes)
        self._free_slots = list(range(SESSION_REQUEST_SLOTS))
        self._round = 0
        self._calls: dict[int, Call] = {}
        self._followers: dict[Call, None] = {}  # in order of their coming
        self._room_waiters = 0
        self._is_led = False
        self._broken: Exception | None = None
        self._forgotten: deque[Call] = deque()

    @property
    def max_bytes(self) -> int:
        """What one request may have, its head included."""
        return self._pages.total_bytes

    def under_way(self) -> int:
        """Requests without an answer, abandoned ones included."""
        return len(self._calls)

    def begin(self, request: Request, wait: SessionWait, timeout: float) -> Call:
        """Send it; `finish` or `abandon` must follow. Waits while the session has too many under way.

        EncodeRefused, WaitTimeout, SessionClosed: the daemon never heard of it.
        """
        if request.nbytes > self.max_bytes:
            raise EncodeRefused(
                413,
                f"the request has {request.nbytes} bytes; a session takes {self.max_bytes}",
                "body_too_large",
            )
        self._abandon_forgotten()
        call = self._open(request.nbytes, time.monotonic_ns() + round(timeout * 1e9))
        try:
            self._submit(call, request, wait)
        except _NotSent as error:
            with self._lock:
                self._close_call(call)
            raise error.reason from None
        except BaseException:
            self.abandon(call)
            raise
        return call

    def finish(self, call: Call) -> SessionCompletion:
        """Wait for its SHAPE or READY, whose lease is the caller's to end.

        EncodeRefused, LeaseRefused (the session's cap), WaitTimeout (the encode is cancelled), SessionClosed.
        """
        try:
            answer = call.answer or self._wait(call)
        except BaseException:
            self.abandon(call)
            raise
        if answer.kind is SessionAnswer.FAILED:
            raise self._refusal(call, answer)
        return answer

    def forget(self, call: Call) -> None:
        """As abandon, soon: for the garbage collector, which comes in the middle of anything."""
        self._forgotten.append(call)

    def close(self) -> None:
        """End every wait with SessionClosed; returns once no thread uses the ring."""
        with self._changed:
            self._break(SessionClosed("this session is closed"))
            while self._is_led:
                self._completions.wake()
                self._changed.wait()
            self._completions.close()

    # --- before the answer ---

    def _open(self, nbytes: int, deadline_ns: int) -> Call:
        """A request slot and a run of the input region; waits for both."""
        with self._lock:
            while True:
                self._check_open()
                offset = self._pages.allocate(nbytes) if self._free_slots else None
                if offset is not None:
                    break
                self._wait_for_room(deadline_ns)
            self._round += SESSION_REQUEST_SLOTS
            slot = self._free_slots.pop()
            call = self._calls[slot] = Call(self._round + slot, offset, nbytes, deadline_ns)
        return call

    def _submit(self, call: Call, request: Request, wait: SessionWait) -> None:
        try:
            self._pages.write(call.offset, request.pieces)
        except OSError:
            reason = EncodeRefused(503, "no memory for this session's input region", "memory_full", 1.0)
            raise _NotSent(reason) from None
        sent = self._submissions.send(
            SessionDescriptor(
                SessionKind.ENCODE,
                request=call.number,
                offset=call.offset,
                nbytes=request.nbytes,
                deadline_ns=call.deadline_ns,
                metadata_bytes=request.metadata_bytes,
                req_id_bytes=request.req_id_bytes,
                wait=wait,
            )
        )
        if not sent:
            raise _NotSent(EncodeRefused(429, "this session's ring is full", "queue_full", 1.0))

    def _wait_for_room(self, deadline_ns: int) -> None:
        """Until something changed. Holds the lock; whoever waits here leads if nobody else does."""
        remaining_ns = deadline_ns - time.monotonic_ns()
        if remaining_ns <= 0:
            raise WaitTimeout("this session's input region and request slots were in use all the time")
        if self._is_led:
            self._room_waiters += 1
            self._changed.wait(remaining_ns / 1e9)
            self._room_waiters -= 1
            return
        self._is_led = True
        self._lock.release()
        try:
            self._take_some(remaining_ns)
        finally:
            self._lock.acquire()
            self._hand_over()

    # --- the answer ---

    def _wait(self, call: Call) -> SessionCompletion:
        while True:
            with self._lock:
                if call.answer is not None:
                    return call.answer
                self._check_open()
                bell = self._lead_or_follow(call)
            if bell is None:
                try:
                    self._lead(call, call.deadline_ns)
                finally:
                    with self._lock:
                        self._hand_over()
            elif (remaining_ns := call.deadline_ns - time.monotonic_ns()) > 0:
                bell.acquire(timeout=remaining_ns / 1e9)
                call.rung = False
            if call.answer is None and time.monotonic_ns() >= call.deadline_ns:
                raise WaitTimeout("the encode was not done in time")

    def _lead_or_follow(self, call: Call) -> threading.Lock | None:
        """None: this thread leads now. Else the bell that wakes it. Holds the lock."""
        if not self._is_led:
            self._is_led = True
            self._followers.pop(call, None)
            return None
        self._followers[call] = None
        if call.bell is None:
            call.bell = threading.Lock()
            call.bell.acquire()
        return call.bell

    def _lead(self, call: Call, deadline_ns: int) -> None:
        """Take answers for everybody until one's own is there."""
        while call.answer is None and self._broken is None:
            remaining_ns = deadline_ns - time.monotonic_ns()
            if remaining_ns <= 0:
                return
            self._take_some(remaining_ns)

    def _take_some(self, timeout_ns: int) -> None:
        """Sleep until an answer has come; deliver all that are there. Only the leader, without the lock."""
        try:
            slots = self._completions.take_many(_TAKE_MAX, min(timeout_ns, _SLICE_NS))
            if slots:
                self._deliver(slots)
            else:
                self._check_daemon()
        except (SessionClosed, RegionCorrupt) as error:
            with self._lock:
                self._break(error)
            raise

    def _deliver(self, slots: bytes) -> None:
        unwanted: list[int] = []
        with self._lock:
            for answer in SessionCompletion.unpack_many(slots):
                call = self._calls.get(answer.request % SESSION_REQUEST_SLOTS)
                if call is None or call.number != answer.request:
                    raise RegionCorrupt("an answer to a request that is not under way")
                if answer.kind is SessionAnswer.FAILED:
                    call.fault = self._fault(answer)
                elif call.abandoned:
                    unwanted.append(answer.lease)
                call.answer = answer
                self._close_call(call)
                if call.bell is not None:
                    self._ring(call)
        for lease in unwanted:
            self._end_lease(lease)

    def _fault(self, answer: SessionCompletion) -> SessionFault:
        offset = session_fault_offset(answer.request)
        if answer.fault_bytes > SESSION_FAULT_BYTES:
            raise RegionCorrupt(f"a fault of {answer.fault_bytes} bytes")
        try:
            return _decode_fault(self._control.view[offset : offset + answer.fault_bytes])
        except msgspec.MsgspecError:
            raise RegionCorrupt("a fault that cannot be decoded") from None

    def _refusal(self, call: Call, answer: SessionCompletion) -> Exception:
        fault = call.fault or SessionFault("", "the daemon gave no reason")
        if fault.code == "session_full":
            return LeaseRefused("this session holds its share of leased bytes; release a view first")
        if fault.code == "deadline_passed" and time.monotonic_ns() >= call.deadline_ns:
            return WaitTimeout("the encode was not done in time")
        retry_after_s = answer.retry_after_ms / 1000 or None
        return EncodeRefused(answer.status, fault.message, fault.code, retry_after_s)

    # --- after it, and instead of it ---

    def abandon(self, call: Call) -> None:
        """Nobody waits for this one any more: cancel it; its slot and run are free when its answer comes."""
        with self._lock:
            self._followers.pop(call, None)
            if not self._is_led:  # this thread may have been the one to lead next
                self._hand_over()
            answer = call.answer
            if answer is None:
                call.abandoned = True
            if self._broken is not None:
                return
        if answer is None:
            self._submissions.send(SessionDescriptor(SessionKind.CANCEL, request=call.number))
        elif answer.kind is not SessionAnswer.FAILED:
            self._end_lease(answer.lease)

    def _abandon_forgotten(self) -> None:
        while self._forgotten:
            self.abandon(self._forgotten.popleft())

    def _close_call(self, call: Call) -> None:
        """Its slot and its run may be used again. Holds the lock."""
        slot = call.number % SESSION_REQUEST_SLOTS
        del self._calls[slot]
        self._free_slots.append(slot)
        self._pages.free(call.offset, call.nbytes)
        if self._room_waiters:
            self._changed.notify_all()

    def _hand_over(self) -> None:
        """Lead no more; wake who leads next. Holds the lock."""
        self._is_led = False
        for follower in self._followers:
            if follower.answer is None:
                self._ring(follower)
                break
        if self._room_waiters or self._broken is not None:
            self._changed.notify_all()

    def _ring(self, call: Call) -> None:
        """Wake the thread of a call, if it sleeps or is about to. Holds the lock."""
        waits = call in self._followers
        if waits and call.answer is not None:
            del self._followers[call]
        if waits and call.bell is not None and not call.rung:
            call.rung = True
            call.bell.release()

    def _break(self, reason: Exception) -> None:
        """No more answers will come: everybody hears why. Holds the lock."""
        if self._broken is None:
            self._broken = reason
        for follower in list(self._followers):
            self._ring(follower)
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise SessionClosed(str(self._broken))
