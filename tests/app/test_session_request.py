"""app.session_request: one answer and one permit back, whatever happens; the engine is played by hand."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from app.admission import Admission
from app.errors import DeadlinePassed, MemoryFull, NoWorkerReady, QueueFull, RequestCancelled, RequestError
from app.inflight import Flight, Listener, Outcome
from app.jobs import EncodeJob
from app.session_copy import EncodeLimits
from app.session_request import EncodePath, SessionRequest
from shm.arena import InputArena
from shm.encode_request import pack_request
from shm.layout import SessionDescriptor, SessionKind, SessionWait
from shm.session import SessionRegions, create_session_regions, write_run
from tests.app.support import on_loop, small_arena, until

INPUT_BYTES = 8 << 20


@dataclass
class Hand:
    """The engine and the session of one test."""

    arena: InputArena
    regions: SessionRegions
    admission: Admission
    refusal: RequestError | None = None
    jobs: list[EncodeJob] = field(default_factory=list)
    quits: int = 0
    blocks: int = 0
    errors: list[RequestError] = field(default_factory=list)

    def begin(self, job: EncodeJob, listener: Listener) -> Flight:
        self.jobs.append(job)
        job.block.free()
        if self.refusal is not None:
            raise self.refusal
        return Flight(job, job.deadline_ns)

    def quit(self, flight: Flight, listener: Listener) -> None:
        self.quits += 1

    def check_served(self, modality: str) -> None:
        pass

    def answer_block(self, number: int, outcome: Outcome) -> None:
        self.blocks += 1

    def answer_error(self, number: int, error: RequestError) -> None:
        self.errors.append(error)

    def start(self, item: bytes = b"item", seconds: float = 60.0, req_id: str = "") -> SessionRequest:
        packed = pack_request([item], "image", req_id)
        write_run(self.regions.input_fd, 0, packed.pieces)
        descriptor = SessionDescriptor(
            SessionKind.ENCODE,
            request=256,
            nbytes=packed.nbytes,
            deadline_ns=time.monotonic_ns() + int(seconds * 1e9),
            metadata_bytes=packed.metadata_bytes,
            req_id_bytes=packed.req_id_bytes,
            wait=SessionWait.SHAPE,
        )
        limits = EncodeLimits(60 * 10**9, INPUT_BYTES, max_items=4, max_item_bytes=INPUT_BYTES)
        request = SessionRequest(self, EncodePath(self, self.admission, self.arena, limits), descriptor, 5)
        request.start(self.regions)
        return request

    @property
    def is_clean(self) -> bool:
        """Whether permits and pages are all back."""
        return self.admission.statistics().in_flight == 0 and self.arena.statistics().used_runs == 0


@asynccontextmanager
async def scene(workers_ready: bool = True, in_flight: int = 1) -> AsyncIterator[Hand]:
    with small_arena() as arena, create_session_regions(bytes(16), 1, INPUT_BYTES) as regions:
        yield Hand(arena, regions, Admission(in_flight, lambda: workers_ready))


@on_loop
async def test_a_request_becomes_a_job_and_ends_with_its_answer() -> None:
    async with scene() as hand:
        request = hand.start(req_id="name")
        [job] = hand.jobs
        assert (job.req_key, job.modality, job.wait, job.item_count) == ("0/name", "image", "shape", 1)
        hand.start()
        assert [type(error) for error in hand.errors] == [QueueFull], "one permit only"
        request.failed(NoWorkerReady("gone"))
        request.end(RequestCancelled("too late"))
        assert len(hand.errors) == 2
        assert hand.is_clean


@on_loop
async def test_one_without_a_name_joins_nobody_by_it() -> None:
    async with scene() as hand:
        hand.start().end(RequestCancelled("cancelled"))
        assert hand.jobs[0].req_key == "session 5/256"
        assert hand.quits == 1
        assert hand.is_clean


@pytest.mark.parametrize("item", [b"small", bytes(2 << 20)], ids=["at once", "after a thread"])
def test_what_the_engine_refuses_is_answered_once(item: bytes) -> None:
    @on_loop
    async def run() -> None:
        async with scene() as hand:
            hand.refusal = NoWorkerReady("none")
            hand.start(item)
            await until(lambda: hand.errors != [])
            assert [type(error) for error in hand.errors] == [NoWorkerReady]
            assert hand.is_clean

    run()


@on_loop
async def test_one_that_ends_while_a_thread_copies_never_reaches_the_engine() -> None:
    async with scene() as hand:
        hand.start(bytes(2 << 20)).end(RequestCancelled("cancelled"))
        await until(lambda: hand.is_clean)
        assert hand.jobs == []
        assert len(hand.errors) == 1


@on_loop
async def test_no_worker_no_time_and_no_memory_are_answers() -> None:
    async with scene(workers_ready=False) as hand:
        hand.start()
        assert [type(error) for error in hand.errors] == [NoWorkerReady]
    async with scene() as hand:
        hand.start(seconds=-1)
        most = hand.arena.allocate(3 << 20)
        assert most is not None
        with most:
            hand.start(bytes(2 << 20))
        assert [type(error) for error in hand.errors] == [DeadlinePassed, MemoryFull]
        assert hand.is_clean
