"""The engine: everything between an EncodeJob and an Encoded. Owns the arena, the workers and the leases.

Built by `app.server` and driven by `app.encode`. Its parts are made in one function, `__aenter__`, in the
order in which they depend on each other, and undone backwards.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from app.admission import Admission
from app.attach_socket import listening_attach_socket
from app.completions import Completions, CompletionStatistics, HandleOrigin
from app.config import ServeConfig, need_bytes
from app.dispatch import Dispatch, DispatchStatistics
from app.errors import (
    ConfigError,
    DeadlinePassed,
    Draining,
    MemoryFull,
    ModalityNotServed,
    RequestError,
)
from app.inflight import Flight, Inflight, InflightStatistics, Listener, Waiter
from app.jobs import Encoded, EncodeJob
from app.launch import Launcher
from app.leases import Leases, LeaseStatistics
from app.place import Place, PlaceState, WorkerStatus
from app.segments import Block, Segment, Segments, SegmentStatistics
from app.session_copy import EncodeLimits
from app.session_request import EncodePath
from app.sessions import Sessions, SessionStatistics
from app.supervisor import Supervisor
from app.worker import Worker, WorkerCondition
from shm.arena import InputArena, create_arena
from shm.errors import RegionUnavailable
from shm.messages import Handle
from shm.pages import PageStatistics
from shm.region import Backing, Region, choose_backing, reopen_read_only

SESSION_SHARE_OF_SEGMENT = 0.25
Joined = TypeVar("Joined")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Every part's own count, for /load, for metrics, and for tests that all has come back."""

    inflight: InflightStatistics
    dispatch: DispatchStatistics
    completions: CompletionStatistics
    leases: LeaseStatistics
    segments: list[SegmentStatistics]
    arena: PageStatistics
    sessions: SessionStatistics
    restarts: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one living worker has to do, in tickets and rows, and what its segment has left."""

    index: int
    state: str
    slow: bool
    requests: int
    outstanding_cost: int
    segment_free_bytes: int


class Engine:
    """`async with Engine(config) as engine`: returns without waiting for any worker to be READY.

    arena: where input blocks for `encode` and `begin` are allocated. admission: who lets in the encodes that
    come over sessions; the HTTP half takes its permits from the same one.
    """

    arena: InputArena

    def __init__(self, config: ServeConfig, admission: Admission | None = None) -> None:
        self._config = config
        self._admission = admission or Admission(
            config.max_queued_requests,
            self.ready,
            max_queued_bytes=config.max_queued_bytes,
            check_room=self.check_room,
        )
        self._boot_id = secrets.token_bytes(16)
        self._is_draining = False
        self._inflight = Inflight()
        self._leases = Leases(
            unattached_s=config.lease_timeout_s,
            session_cap_bytes=int(config.segment_bytes * SESSION_SHARE_OF_SEGMENT),
            on_unleased=self._block_unleased,
        )
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """ConfigError if the arena cannot be had or the attach socket is taken."""
        config = self._config
        async with AsyncExitStack() as undo:
            backing = choose_backing(config.shm_backing, need_bytes(config))
            listener = undo.enter_context(listening_attach_socket(config))
            arena = undo.enter_context(await asyncio.to_thread(self._create_arena, backing))
            self.arena = InputArena(arena)
            arena_read_only_fd = reopen_read_only(arena.fd)
            undo.callback(os.close, arena_read_only_fd)
            self._segments = Segments(backing, self._memory_freed)
            undo.callback(self._segments.close)
            self._sessions = Sessions(
                listener,
                boot_id=self._boot_id,
                http=_http_address(config),
                allow_uids=frozenset(config.attach_allow_uids) or frozenset({0, os.getuid()}),
                leases=self._leases,
                segments=self._segments,
                encodes=EncodePath(self, self._admission, self.arena, EncodeLimits.of(config)),
            )
            self._sessions.start()
            undo.callback(self._sessions.close)
            # Undone before the sessions end: what readers still have mapped must stay as it is.
            undo.callback(self._leases.close)
            self._start_workers(Launcher(config, self._boot_id, backing, arena_read_only_fd))
            undo.push_async_callback(self._supervisor.stop)
            undo.push_async_callback(self._drain_if_nobody_did)
            self._undo = undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain, stop the workers, hang up on the readers, give all memory back."""
        await self._undo.aclose()

    async def encode(self, job: EncodeJob) -> Encoded:
        """One job from its input block to a leased block. Raises `app.errors`.

        The input block is the engine's from here on. Whoever is cancelled, or whose deadline passes, leaves;
        when nobody wants the answer any more the worker is told to drop the work.
        """
        flight, waiter = self._enter(job, Flight.join)
        answer: Encoded | None = None
        try:
            async with asyncio.timeout((job.deadline_ns - time.monotonic_ns()) / 1e9):
                answer = await waiter
            return answer
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the encode was done") from None
        finally:
            if answer is None:
                self._leave(flight, waiter)

    def begin(self, job: EncodeJob, listener: Listener) -> Flight:
        """As encode, for one who waits without a task and keeps the deadline itself. Raises `app.errors`.

        The listener may be told before this returns.
        """
        flight, _ = self._enter(job, lambda flight: flight.listeners.add(listener))
        return flight

    def quit(self, flight: Flight, listener: Listener) -> None:
        """A listener that has not been told anything yet waits no longer."""
        flight.listeners.discard(listener)
        if not flight.is_wanted:
            self._dispatch.abandon(flight)

    def check_served(self, modality: str) -> None:
        """ModalityNotServed unless some checkpoint has a tower for it, or none is loaded yet."""
        if not self._supervisor.serves(modality):
            raise ModalityNotServed(
                f"modality {modality} is not served by this checkpoint, which has: "
                f"{', '.join(self._supervisor.modalities())}"
            )

    def handles(self, handle: Handle, count: int) -> list[Handle]:
        """count handles to the block of one that was just given out, which is the first; each has a lease of
        its own."""
        nonces = [handle.nonce, *(self._leases.grant_beside(handle.nonce) for _ in range(count - 1))]
        return [msgspec.structs.replace(handle, nonce=nonce) for nonce in nonces]

    def release(self, nonce: str) -> bool:
        """End the lease of a handle. False if there is none; HandleAttached if it is a session's."""
        return self._leases.release(nonce)

    def ready(self) -> bool:
        """Whether an encode that came now would find a worker."""
        return not self._is_draining and self._supervisor.is_ready()

    def is_started(self) -> bool:
        """Whether every place has its worker ready, but those that are not started again."""
        states = {worker.state for worker in self.workers()}
        return WorkerCondition.READY in states and states <= {WorkerCondition.READY, PlaceState.FAILED}

    @property
    def beats(self) -> int:
        """How often the workers have been looked after."""
        return self._supervisor.beats

    def check_room(self, nbytes: int) -> None:
        """MemoryFull or QueueFull if a request of nbytes of media would not find room soon."""
        if nbytes > self.arena.largest_free_bytes:
            raise MemoryFull(f"the arena has no room for {nbytes} bytes now")
        self._dispatch.check_room()

    def workers(self) -> list[WorkerStatus]:
        """Every worker place, in order."""
        return self._supervisor.statuses()

    def loads(self) -> list[WorkerLoad]:
        """Every living worker, in order of place."""
        return [
            WorkerLoad(
                worker.place,
                str(worker.condition),
                worker.is_slow,
                len(worker.attempts),
                worker.outstanding_cost,
                worker.segment.free_bytes,
            )
            for worker in self._supervisor.workers()
        ]

    @property
    def queue_depth(self) -> int:
        """Encodes that no worker has yet."""
        return self._dispatch.statistics().waiting

    def segments(self) -> list[Segment]:
        """Every segment that exists."""
        return self._segments.all()

    async def failed(self) -> str:
        """Returns the reason once all places have failed for their configuration (exit status 78)."""
        return await self._supervisor.failed()

    async def drain(self, timeout_s: float) -> None:
        """Take no more jobs; wait for those under way up to the limit, then end them with 503."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._inflight.wait_empty()
        except TimeoutError:
            self._inflight.fail_all(Draining("the daemon is stopping", retry_after_s=1.0))

    def statistics(self) -> EngineStatistics:
        """Every part's count, now."""
        return EngineStatistics(
            self._inflight.statistics(),
            self._dispatch.statistics(),
            self._completions.statistics(),
            self._leases.statistics(),
            self._segments.statistics(),
            self.arena.statistics(),
            self._sessions.statistics(),
            sum(status.restarts for status in self._supervisor.statuses()),
        )

    async def _drain_if_nobody_did(self) -> None:
        if not self._is_draining:
            await self.drain(self._config.shutdown_timeout_s)

    def _create_arena(self, backing: Backing) -> Region:
        try:
            return create_arena(self._config.arena_bytes, boot_id=self._boot_id, backing=backing)
        except RegionUnavailable as unavailable:
            raise ConfigError(f"--arena-size: {unavailable}") from None

    def _start_workers(self, launcher: Launcher) -> None:
        config = self._config
        origin = HandleOrigin(self._boot_id.hex(), config.attach_socket)
        self._completions = Completions(
            self._inflight, self._leases, self._segments, origin,
            on_progress=self._pump, on_given_back=self._try_again,
        )  # fmt: skip
        places = [
            Place(
                index, launcher, self._segments, self._completions, config.segment_bytes,
                readers=self._leases.readers, on_ready=self._pump, on_lost=self._worker_lost,
            )
            for index in range(config.workers)
        ]  # fmt: skip
        self._supervisor = Supervisor(
            places,
            heartbeat_s=config.heartbeat_s,
            stall_s=config.stall_timeout_s,
            slow_s=config.stall_timeout_s * config.stuck_share,
            on_beat=self._beat,
        )
        self._dispatch = Dispatch(self._inflight, self._supervisor)
        self._supervisor.start()

    def _enter(self, job: EncodeJob, join: Callable[[Flight], Joined]) -> tuple[Flight, Joined]:
        """Join the flight of this very job, or open one and find it a worker. The joining comes first."""
        try:
            if self._is_draining:
                raise Draining("the daemon is stopping", retry_after_s=1.0)
            self._dispatch.check_content(job.digest)
            flight = self._inflight.find(job)
        except RequestError:
            job.block.free()
            raise
        if flight is None:
            flight = self._inflight.open(job)
            joined = join(flight)
            self._dispatch.submit(flight)
        else:
            self._inflight.join(flight, job)
            joined = join(flight)
            self._completions.answer_late_joiner(flight)
        return flight, joined

    def _leave(self, flight: Flight, waiter: Waiter) -> None:
        """Undo `_enter` for one who has no answer: it failed, was cancelled, or its deadline passed."""
        flight.leave(waiter)
        if waiter.cancelled():
            if not flight.is_wanted:
                self._dispatch.abandon(flight)
        elif waiter.exception() is None:
            # The answer came in the same moment as the cancellation: nobody will ever see its handle.
            self._leases.release(waiter.result().handle.nonce)

    def _block_unleased(self, block: Block) -> None:
        """Nobody may read it any more: stop filling it, or have it reclaimed."""
        if block.attempt is not None:
            self._dispatch.abandon(block.attempt.flight)
        else:
            self._segments.reclaim(block)

    def _worker_lost(self, worker: Worker) -> None:
        """After proof of its death: take over its segment, then move or end its tickets."""
        for block in self._segments.recover(worker.segment):
            self._leases.block_ended(block)
        self._segments.drop_if_unused(worker.segment)
        self._dispatch.worker_lost(worker)

    def _memory_freed(self, place: int) -> None:
        self._supervisor.memory_freed(place)

    def _try_again(self, flight: Flight) -> None:
        self._dispatch.try_again(flight)

    def _pump(self) -> None:
        self._dispatch.pump()

    def _beat(self) -> None:
        self._dispatch.rescue()
        # A ring that was full has room again without any completion to say so.
        self._dispatch.pump()


def _http_address(config: ServeConfig) -> str:
    """What a session is told, in the form of Welcome.http."""
    if config.uds:
        return f"unix:{config.uds}"
    return f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
