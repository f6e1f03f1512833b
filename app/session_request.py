"""One encode that came over a session, from its permit to its answer. `app.session_encodes` has several.

It lives as over HTTP, but without a task, because all that it waits for are callbacks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from app.errors import DeadlinePassed, RequestError
from app.ingest import INLINE_DECODE_BYTES, allocate_input
from app.jobs import EncodeJob
from app.session_copy import Copied, EncodeLimits, copy_and_close, copy_request
from shm.layout import SessionDescriptor, SessionWait

if TYPE_CHECKING:
    from app.admission import Admission
    from app.inflight import Flight, Listener, Outcome
    from shm.arena import InputArena, InputBlock
    from shm.session import SessionRegions

_TOO_LATE: Final = "the deadline passed before the encode was done"


class Encoder(Protocol):
    """What is asked of the engine."""

    def begin(self, job: EncodeJob, listener: Listener) -> Flight:
        """Start a job whose block is the engine's from here on. Raises `app.errors`."""

    def quit(self, flight: Flight, listener: Listener) -> None:
        """A listener that has not been told anything yet waits no longer."""

    def check_served(self, modality: str) -> None:
        """ModalityNotServed unless it is."""


@dataclass(frozen=True, slots=True)
class EncodePath:
    """What every session's encodes go through."""

    encoder: Encoder
    admission: Admission
    arena: InputArena
    limits: EncodeLimits


class Answerer(Protocol):
    """Who tells the client, once for each request."""

    def answer_block(self, number: int, outcome: Outcome) -> None:
        """The block is there."""

    def answer_error(self, number: int, error: RequestError) -> None:
        """There will be none."""


class SessionRequest:
    """One request from its permit to its answer. It is the permit's holder and the flight's listener."""

    def __init__(
        self, owner: Answerer, path: EncodePath, descriptor: SessionDescriptor, session: int
    ) -> None:
        self.number = descriptor.request
        self._owner = owner
        self._path = path
        self._descriptor = descriptor
        self._session = session
        self.deadline_ns = descriptor.deadline_ns  # bounded once it is admitted
        self._flight: Flight | None = None
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
        self.deadline_ns = min(descriptor.deadline_ns, now_ns + self._path.limits.request_timeout_ns)
        if self.deadline_ns <= now_ns:
            self.end(DeadlinePassed(_TOO_LATE))
            return
        try:
            block = allocate_input(self._path.arena, descriptor.nbytes)
        except RequestError as error:
            self._answer_error(error)
            return
        if descriptor.nbytes <= INLINE_DECODE_BYTES:
            copy = partial(copy_request, regions.input_fd, descriptor, block, self._path.limits)
            self._go_on(block, copy)
        else:
            # A descriptor of its own: the session may end meanwhile, and its number be another session's.
            own_fd = os.dup(regions.input_fd)
            future = asyncio.get_running_loop().run_in_executor(
                None, copy_and_close, own_fd, descriptor, block, self._path.limits
            )
            future.add_done_callback(lambda done: self._go_on(block, done.result))

    def end(self, cause: RequestError) -> None:
        """Stop, for this cause: the client's, the deadline's, the drain's."""
        if self._is_over:
            return
        if self._flight is not None:
            self._path.encoder.quit(self._flight, self)
        self._answer_error(cause)

    def end_if_late(self, now_ns: int) -> None:
        """Stop if the deadline has passed."""
        if self.deadline_ns <= now_ns:
            self.end(DeadlinePassed(_TOO_LATE))

    def answered(self, outcome: Outcome) -> None:
        """The flight's block is there."""
        self._finish()
        self._owner.answer_block(self.number, outcome)

    def failed(self, error: RequestError) -> None:
        """The flight has ended without one."""
        self._answer_error(error)

    def _go_on(self, block: InputBlock, copied: Callable[[], Copied]) -> None:
        """The bytes are in the block, or copied() says why not."""
        with block:
            if self._is_over:  # while a thread copied
                return
            try:
                job = self._job(block, copied())
                self._path.encoder.check_served(job.modality)
                block.hand_over()
                flight = self._path.encoder.begin(job, self)
            except RequestError as error:
                self._answer_error(error)
                return
        if not self._is_over:
            self._flight = flight

    def _job(self, block: InputBlock, copied: Copied) -> EncodeJob:
        # As over HTTP, the same req_id joins; without one nobody can ask for the same request.
        key = f"0/{copied.req_id}" if copied.req_id else f"session {self._session}/{self.number}"
        return EncodeJob(
            req_key=key,
            modality=copied.modality,
            block=block,
            metadata_bytes=self._descriptor.metadata_bytes,
            item_count=copied.item_count,
            deadline_ns=self.deadline_ns,
            wait="shape" if self._descriptor.wait == SessionWait.SHAPE else "ready",
            digest=copied.digest,
        )

    def _answer_error(self, error: RequestError) -> None:
        self._finish()
        self._owner.answer_error(self.number, error)

    def _finish(self) -> None:
        self._is_over = True
        self._flight = None
        if self._is_admitted:
            self._path.admission.give_back(self)
