"""Encodes that come over a session's own rings: the same request as POST /encode, without HTTP.

`app.sessions` has one SessionEncodes per session and gives it what the client says. One timer watches all
deadlines of a session, and the answers of one turn of the loop are published together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.errors import RequestCancelled, RequestError, cause_of
from app.session_copy import HEAD_MAX_BYTES
from app.session_request import EncodePath, SessionRequest
from shm.errors import LeaseRefused, RegionCorrupt
from shm.layout import (
    SESSION_REQUEST_SLOTS,
    SLOT_BYTES,
    SessionAnswer,
    SessionCompletion,
    SessionDescriptor,
    SessionWait,
)
from shm.messages import SessionFault

if TYPE_CHECKING:
    from app.inflight import Outcome
    from app.leases import Lease
    from app.segments import Block
    from shm.session import SessionRegions


class SessionEncodes:
    """One session's requests under way, by request slot.

    lease(block): a lease of this session that its client can map; LeaseRefused. abort(reason): end the
    session, in a turn of its own.
    """

    def __init__(
        self,
        path: EncodePath,
        session: int,
        regions: SessionRegions,
        lease: Callable[[Block], Lease],
        abort: Callable[[str], None],
    ) -> None:
        self.begun = 0
        self._path = path
        self._session = session
        self._regions = regions
        self._lease = lease
        self._abort = abort
        self._requests: dict[int, SessionRequest] = {}
        self._answers = bytearray()  # of this turn of the loop, whole slots
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0  # when it ends
        self._is_open = True

    @property
    def under_way(self) -> int:
        """Requests without an answer."""
        return len(self._requests)

    def begin(self, descriptor: SessionDescriptor) -> None:
        """An ENCODE. RegionCorrupt for numbers that no client of ours writes."""
        self._check(descriptor)
        self.begun += 1
        request = SessionRequest(self, self._path, descriptor, self._session)
        self._requests[descriptor.request % SESSION_REQUEST_SLOTS] = request
        request.start(self._regions)
        if self._timer is None or request.deadline_ns < self._timer_ns:
            self._watch_deadlines()

    def cancel(self, number: int) -> None:
        """A CANCEL. What has its answer already, or never was, is ignored."""
        request = self._requests.get(number % SESSION_REQUEST_SLOTS)
        if request is not None and request.number == number:
            request.end(RequestCancelled("the request was cancelled"))

    def close(self) -> None:
        """The session is over: nobody reads the answers."""
        self._publish_answers()
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        for request in list(self._requests.values()):
            request.end(RequestCancelled("the client went away"))

    def answer_block(self, number: int, outcome: Outcome) -> None:
        """SHAPE or READY, with a lease on the block; FAILED if the session may not have one more."""
        self._forget(number)
        if not self._is_open:
            return
        block = outcome.block
        try:
            lease = self._lease(block)
        except LeaseRefused as refused:
            self._fail(number, 429, "session_full", str(refused), None)
            return
        self._publish(
            SessionCompletion(
                SessionAnswer.READY if outcome.state == "ready" else SessionAnswer.SHAPE,
                number,
                lease.number,
                block.generation,
                block.offset,
                block.nbytes,
                block.segment.place,
                block.segment.epoch,
                block.index,
                block.rows,
                block.dim,
                block.dtype,
                block.metadata_bytes,
            )
        )

    def answer_error(self, number: int, error: RequestError) -> None:
        """FAILED, in the words of `app.problem`."""
        self._forget(number)
        cause = cause_of(error)
        retry_after_s = (error.retry_after_s or 1.0) if cause.status in (429, 503) else None
        self._fail(number, cause.status, cause.code, error.message, retry_after_s)

    def _fail(self, number: int, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        if not self._is_open:
            return
        fault_bytes = self._regions.store_fault(number, SessionFault(code, message))
        retry_after_ms = 0 if retry_after_s is None else round(retry_after_s * 1000)
        self._publish(
            SessionCompletion(
                SessionAnswer.FAILED,
                number,
                status=status,
                retry_after_ms=retry_after_ms,
                fault_bytes=fault_bytes,
            )
        )

    def _publish(self, completion: SessionCompletion) -> None:
        """At the end of this turn of the loop, with whatever else is answered until then."""
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._publish_answers)
        self._answers += completion.pack()

    def _publish_answers(self) -> None:
        """There is room for every request slot's answer unless the client does not take them."""
        if not self._answers or not self._is_open:
            return
        answers, self._answers = self._answers, bytearray()
        try:
            published = self._regions.completions.try_publish_many(answers)
            if published * SLOT_BYTES < len(answers):
                self._abort("it leaves its answers in the ring")
        except RegionCorrupt as corrupt:
            self._abort(str(corrupt))

    def _watch_deadlines(self) -> None:
        """Set the timer for the first deadline of those under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._requests:
            return
        self._timer_ns = min(request.deadline_ns for request in self._requests.values())
        delay_s = max(0, self._timer_ns - time.monotonic_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_late)

    def _end_late(self) -> None:
        now_ns = time.monotonic_ns()
        for request in list(self._requests.values()):
            request.end_if_late(now_ns)
        self._watch_deadlines()

    def _forget(self, number: int) -> None:
        del self._requests[number % SESSION_REQUEST_SLOTS]

    def _check(self, descriptor: SessionDescriptor) -> None:
        limits = self._path.limits
        head_bytes = descriptor.metadata_bytes + descriptor.req_id_bytes
        if descriptor.request % SESSION_REQUEST_SLOTS in self._requests:
            raise RegionCorrupt("two requests under way in one request slot")
        if descriptor.wait not in (SessionWait.READY, SessionWait.SHAPE):
            raise RegionCorrupt(f"unknown wait {descriptor.wait}")
        if descriptor.offset > limits.input_bytes or (
            descriptor.nbytes > limits.input_bytes - descriptor.offset
        ):
            raise RegionCorrupt("a request outside the input region")
        if not 0 < descriptor.metadata_bytes <= head_bytes <= min(HEAD_MAX_BYTES, descriptor.nbytes):
            raise RegionCorrupt("a request whose head is not inside it")
