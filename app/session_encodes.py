"""Encodes that come over a session's own rings: the same request as POST /encode, without HTTP.

`app.sessions` has one SessionEncodes per session and gives it what the client says. Each request lives as
over HTTP: permit, input block, copy, worker, answer; but without a task, because all that it waits for are
callbacks. The client's memory is untrusted: it is copied once, into the arena, before anything looks at it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from app.errors import (
    DeadlinePassed,
    InvalidRequest,
    RequestCancelled,
    RequestError,
    cause_of,
)
from app.ingest import INLINE_DECODE_BYTES, Shape, allocate_input, check_item_bytes, content_digest
from app.jobs import EncodeJob
from app.schema import MAX_REQ_ID_CHARACTERS, check_modality, check_req_id
from shm.errors import LeaseRefused, RegionCorrupt
from shm.layout import (
    SESSION_REQUEST_SLOTS,
    SessionAnswer,
    SessionCompletion,
    SessionDescriptor,
    SessionWait,
    page_align,
)
from shm.messages import RequestMetadata, SessionFault
from shm.session import read_run

if TYPE_CHECKING:
    from app.admission import Admission
    from app.config import ServeConfig
    from app.inflight import Flight, Listener, Outcome
    from app.leases import Lease
    from app.segments import Block
    from shm.arena import InputArena, InputBlock
    from shm.session import SessionRegions

HEAD_MAX_BYTES = 256 << 10  # of RequestMetadata and req_id
_decode_metadata = msgspec.msgpack.Decoder(RequestMetadata).decode


class Encoder(Protocol):
    """What is asked of the engine."""

    def begin(self, job: EncodeJob, listener: Listener) -> Flight:
        """Start a job whose block is the engine's from here on. Raises `app.errors`."""

    def quit(self, flight: Flight, listener: Listener) -> None:
        """A listener that has not been told anything yet waits no longer."""

    def check_served(self, modality: str) -> None:
        """ModalityNotServed unless it is."""


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What one request may be; as over HTTP."""

    request_timeout_ns: int
    input_bytes: int
    max_items: int
    max_item_bytes: int

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """A session's input region holds as much as a body may have, and the largest item in any case."""
        input_bytes = page_align(max(config.max_body_bytes, config.max_item_bytes + HEAD_MAX_BYTES))
        return cls(
            round(config.request_timeout_s * 1e9), input_bytes, config.max_items, config.max_item_bytes
        )


@dataclass(frozen=True, slots=True)
class EncodePath:
    """What every session's encodes go through."""

    encoder: Encoder
    admission: Admission
    arena: InputArena
    limits: EncodeLimits


@dataclass(frozen=True, slots=True)
class Copied:
    """A request's head as it stands in its own input block, checked; digest as `app.ingest` makes it."""

    modality: str
    req_id: str
    item_count: int
    digest: bytes


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

    def cancel(self, number: int) -> None:
        """A CANCEL. What has its answer already, or never was, is ignored."""
        request = self._requests.get(number % SESSION_REQUEST_SLOTS)
        if request is not None and request.number == number:
            request.end(RequestCancelled("the request was cancelled"))

    def close(self) -> None:
        """The session is over: nobody reads the answers."""
        self._is_open = False
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
        """There is room for every request slot's answer unless the client does not take them."""
        try:
            if not self._regions.completions.try_publish(completion.pack()):
                self._abort("it leaves its answers in the ring")
        except RegionCorrupt as corrupt:
            self._abort(str(corrupt))

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


class SessionRequest:
    """One request from its permit to its answer. It is the permit's holder and the flight's listener."""

    def __init__(
        self, owner: SessionEncodes, path: EncodePath, descriptor: SessionDescriptor, session: int
    ) -> None:
        self.number = descriptor.request
        self._owner = owner
        self._path = path
        self._descriptor = descriptor
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._flight: Flight | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_admitted = False
        self._is_over = False

    def start(self, regions: SessionRegions) -> None:
        """Everything up to the copy; the rest follows at once for a small request, else after a thread."""
        descriptor = self._descriptor
        try:
            self._path.admission.admit(self, descriptor.nbytes)
        except RequestError as error:
            self._answer_error(error)
            return
        self._is_admitted = True
        now_ns = time.monotonic_ns()
        deadline_ns = min(descriptor.deadline_ns, now_ns + self._path.limits.request_timeout_ns)
        if deadline_ns <= now_ns:
            self._pass_deadline()
            return
        self._timer = self._loop.call_later((deadline_ns - now_ns) / 1e9, self._pass_deadline)
        try:
            block = allocate_input(self._path.arena, descriptor.nbytes)
        except RequestError as error:
            self._answer_error(error)
            return
        if descriptor.nbytes <= INLINE_DECODE_BYTES:
            copy = partial(copy_request, regions.input_fd, descriptor, block, self._path.limits)
            self._go_on(block, deadline_ns, copy)
        else:
            # A descriptor of its own: the session may end meanwhile, and its number be another session's.
            own_fd = os.dup(regions.input_fd)
            future = self._loop.run_in_executor(
                None, _copy_and_close, own_fd, descriptor, block, self._path.limits
            )
            future.add_done_callback(lambda done: self._go_on(block, deadline_ns, done.result))

    def end(self, cause: RequestError) -> None:
        """Stop, for this cause: the client's, the deadline's, the drain's."""
        if self._is_over:
            return
        if self._flight is not None:
            self._path.encoder.quit(self._flight, self)
        self._answer_error(cause)

    def answered(self, outcome: Outcome) -> None:
        """The flight's block is there."""
        self._finish()
        self._owner.answer_block(self.number, outcome)

    def failed(self, error: RequestError) -> None:
        """The flight has ended without one."""
        self._answer_error(error)

    def _go_on(self, block: InputBlock, deadline_ns: int, copied: Callable[[], Copied]) -> None:
        """The bytes are in the block, or copied() says why not."""
        with block:
            if self._is_over:  # while a thread copied
                return
            try:
                job = self._job(block, deadline_ns, copied())
                self._path.encoder.check_served(job.modality)
                block.hand_over()
                flight = self._path.encoder.begin(job, self)
            except RequestError as error:
                self._answer_error(error)
                return
        if not self._is_over:
            self._flight = flight

    def _job(self, block: InputBlock, deadline_ns: int, copied: Copied) -> EncodeJob:
        # As over HTTP, the same req_id joins; without one nobody can ask for the same request.
        key = f"0/{copied.req_id}" if copied.req_id else f"session {self._session}/{self.number}"
        return EncodeJob(
            req_key=key,
            modality=copied.modality,
            block=block,
            metadata_bytes=self._descriptor.metadata_bytes,
            item_count=copied.item_count,
            deadline_ns=deadline_ns,
            wait="shape" if self._descriptor.wait == SessionWait.SHAPE else "ready",
            digest=copied.digest,
        )

    def _pass_deadline(self) -> None:
        self.end(DeadlinePassed("the deadline passed before the encode was done"))

    def _answer_error(self, error: RequestError) -> None:
        self._finish()
        self._owner.answer_error(self.number, error)

    def _finish(self) -> None:
        self._is_over = True
        self._flight = None
        if self._timer is not None:
            self._timer.cancel()
        if self._is_admitted:
            self._path.admission.give_back(self)


def _copy_and_close(
    own_fd: int, descriptor: SessionDescriptor, block: InputBlock, limits: EncodeLimits
) -> Copied:
    """copy_request in a thread, which owns the descriptor."""
    try:
        return copy_request(own_fd, descriptor, block, limits)
    finally:
        os.close(own_fd)


def copy_request(
    input_fd: int, descriptor: SessionDescriptor, block: InputBlock, limits: EncodeLimits
) -> Copied:
    """The client's run into the block, and the head from there. Without the interpreter lock where it counts.

    InvalidRequest, InvalidItem, ItemTooLarge as over HTTP.
    """
    view = block.view
    try:
        read_run(input_fd, descriptor.offset, view)
    except (OSError, RegionCorrupt):
        raise InvalidRequest("the session's input region cannot be read") from None
    metadata = _metadata(view[: descriptor.metadata_bytes])
    req_id = _req_id(view[descriptor.metadata_bytes : descriptor.metadata_bytes + descriptor.req_id_bytes])
    check_modality(metadata.modality)
    _check_items(metadata, descriptor.metadata_bytes + descriptor.req_id_bytes, len(view), limits)
    items = (view[item.offset : item.offset + item.nbytes] for item in metadata.items)
    shapes = [Shape(item.kind, len(item.parts) or 1, item.options) for item in metadata.items]
    digest = content_digest(metadata.modality, items, shapes)
    return Copied(metadata.modality, req_id, len(metadata.items), digest)


def _metadata(head: memoryview) -> RequestMetadata:
    try:
        return _decode_metadata(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the request's head cannot be decoded") from None


def _req_id(raw: memoryview) -> str:
    """Empty if the client gave none."""
    if not raw:
        return ""
    if len(raw) > 4 * MAX_REQ_ID_CHARACTERS:
        raise InvalidRequest(f"req_id must have 1 to {MAX_REQ_ID_CHARACTERS} characters")
    try:
        req_id = str(raw, "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("req_id is not UTF-8") from None
    check_req_id(req_id)
    return req_id


def _check_items(metadata: RequestMetadata, head_bytes: int, nbytes: int, limits: EncodeLimits) -> None:
    """Plain files one behind the other: what overlaps would be more work than bytes."""
    if not metadata.items:
        raise InvalidRequest("mm_items is empty")
    if len(metadata.items) > limits.max_items:
        raise InvalidRequest(f"mm_items has more than {limits.max_items} items")
    position = head_bytes
    for index, item in enumerate(metadata.items):
        if item.offset < position or item.nbytes < 0 or item.nbytes > nbytes - item.offset:
            raise InvalidRequest(f"mm_items[{index}] is not inside its request")
        if item.kind != "media" or item.parts or item.options:
            raise InvalidRequest(f"mm_items[{index}] is of a kind that only HTTP takes")
        check_item_bytes(index, item.nbytes, limits.max_item_bytes)
        position = item.offset + item.nbytes
