"""What the engine's tests share: running on a loop, jobs for the stub tower, and a worker played by hand."""

import asyncio
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from app.config import ServeConfig
from app.engine import Engine
from app.inflight import Attempt, Flight
from app.jobs import EncodeJob, Wait
from app.outbox import Outbox
from app.place import WorkerStatus
from app.ranks import RankProcess
from app.segments import Segments
from app.worker import LINK_SLOT_COUNT, Worker
from shm import _core
from shm.arena import InputArena, create_arena
from shm.layout import (
    Completion,
    CompletionKind,
    Dtype,
    RegionKind,
    Submission,
    WorkerState,
    page_align,
)
from shm.link import ControlLink, WorkerLink, create_link
from shm.messages import BlockMetadata, ItemRows, ItemSource, RequestMetadata
from shm.region import Backing, attach_region
from shm.segment import FillingBlock, SegmentWriter, create_segment

BOOT_ID = bytes(range(16))
MEBIBYTE = 1 << 20
PATIENCE_S = 60.0  # only bounds a test that would hang


def on_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on uvloop, as the daemon does."""

    @functools.wraps(story)
    def run(*args: Any, **fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await story(*args, **fixtures)

        uvloop.run(bounded())

    return run


async def until(condition: Callable[[], Any]) -> None:
    """Give the loop, and other processes, turns until the condition holds."""
    while not condition():
        os.sched_yield()
        await asyncio.sleep(0)


async def ready_worker(engine: Engine, place: int = 0, epoch: int = 1) -> WorkerStatus:
    """The worker of this place and epoch, once it is ready."""

    def is_ready() -> bool:
        status = engine.workers()[place]
        return (status.state, status.epoch) == ("ready", epoch)

    await until(is_ready)
    return engine.workers()[place]


def serve_config(directory: Path, **changes: Any) -> ServeConfig:
    """Stub workers, small regions, and an attach socket below directory."""
    settings = {
        "checkpoint": "",
        "tower": "stub",
        "device": "cpu",
        "segment_bytes": 16 * MEBIBYTE,
        "arena_bytes": 96 * MEBIBYTE,
        "attach_socket": str(directory / "run" / "attach.sock"),
        "heartbeat_s": 0.2,
        "shutdown_timeout_s": 5.0,
    }
    return ServeConfig(**(settings | changes))


def make_job(
    arena: InputArena, key: str, *items: bytes, wait: Wait = "ready", seconds: float = 30.0
) -> EncodeJob:
    """A job over these items, packed as app.ingest packs them."""
    sources = []
    position = 4096
    for item in items:
        sources.append(ItemSource(position, len(item)))
        position += page_align(len(item))
    metadata = msgspec.msgpack.encode(RequestMetadata("image", sources))
    block = arena.allocate(position)
    assert block is not None
    block.view[: len(metadata)] = metadata
    for source, item in zip(sources, items, strict=True):
        block.view[source.offset : source.offset + source.nbytes] = item
    deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
    digest = hashlib.sha256(b"\0".join(items)).digest()
    return EncodeJob(key, "image", block, len(metadata), len(items), deadline_ns, wait, digest)


class HandWorker:
    """A real Worker whose process only waits for its end: the test speaks for it, through real regions."""

    def __init__(self, segments: Segments, place: int = 0, epoch: int = 1) -> None:
        backing = Backing.MEMFD
        self._link_region = create_link(LINK_SLOT_COUNT, BOOT_ID, place, epoch, backing)
        segment_region = create_segment(
            2 * MEBIBYTE, boot_id=BOOT_ID, place=place, epoch=epoch, backing=backing
        )
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._worker_link_region = attach_region(os.dup(self._link_region.fd), RegionKind.LINK, writable=True)
        self.worker_segment = attach_region(os.dup(segment_region.fd), RegionKind.SEGMENT, writable=True)
        self.link = WorkerLink(self._worker_link_region, self._bell)
        self.writer = SegmentWriter(self.worker_segment)
        self.corrupt: list[str] = []
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        control_link = ControlLink(self._link_region, self._bell)
        outbox = Outbox(control_link.submissions, self._distrust)
        self.segment = segments.add(place, epoch, segment_region, outbox)
        segments.open_to_readers(self.segment)
        pidfd = os.pidfd_open(self._process.pid)
        self.worker = Worker([RankProcess(self._process, pidfd)], control_link, self.segment, outbox)
        self.link.heartbeat(0)
        self.link.set_state(WorkerState.READY)
        self.worker.observe()

    def _distrust(self, reason: str) -> None:
        self.worker.distrust(reason)

    def taken(self) -> list[Submission]:
        """What control has said since the last call."""
        self.worker.outbox.flush()  # the turn of the loop may not be over
        slots = iter(self.link.submissions.try_take, None)
        return [Submission.unpack(slot) for slot in slots]

    def fill(self, *, rows: int = 4, dim: int = 8, items: int = 1) -> FillingBlock:
        """A FILLING block of float32 rows, all of item 0."""
        parts = [ItemRows(0, rows if item == 0 else 0, [[1, rows, 1]], 1, 1) for item in range(items)]
        metadata = msgspec.msgpack.encode(BlockMetadata("image", parts))
        block = self.writer.allocate(rows * dim * 4, rows, dim, Dtype.FLOAT32, metadata)
        assert block is not None
        return block

    def store_link_word(self, offset: int, value: int) -> None:
        """Scribble over a word of the link."""
        _core.word_store(self._worker_link_region.memory, offset, value)

    def report(self, record: Completion) -> None:
        """Publish one completion record."""
        assert self.link.completions.try_publish(record.pack())

    async def die(self) -> None:
        """The process ends; returns once the death is proved."""
        self._process.kill()
        await self.worker.ended

    async def close(self) -> None:
        """End the process and let go of the link."""
        await self.die()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.worker_segment.close()
        self._worker_link_region.close()
        self._link_region.close()
        os.close(self._bell)


def record_of(kind: CompletionKind, ticket: int, block: FillingBlock) -> Completion:
    """The honest record about a block."""
    return Completion(
        kind,
        ticket,
        block.block,
        block.generation,
        block.offset,
        block.nbytes,
        block.rows,
        block.dim,
        int(block.dtype),
        block.metadata_bytes,
    )


def attempt_of(hand: HandWorker, job: EncodeJob, ticket: int = 1) -> Attempt:
    """An attempt on this worker that no table knows."""
    return Attempt(ticket, 1, Flight(job, job.deadline_ns), hand.worker)


@asynccontextmanager
async def hand_workers(
    count: int = 1, on_freed: Callable[[int], None] = lambda place: None
) -> AsyncIterator[tuple[Segments, list[HandWorker]]]:
    """Workers in places 0 to count - 1, played by hand, and their segments."""
    segments = Segments(Backing.MEMFD, on_freed)
    hands = [HandWorker(segments, place) for place in range(count)]
    try:
        yield segments, hands
    finally:
        segments.close()
        for hand in hands:
            await hand.close()


@contextmanager
def small_arena() -> Iterator[InputArena]:
    """An arena of four mebibytes."""
    with create_arena(4 * MEBIBYTE, boot_id=BOOT_ID, backing=Backing.MEMFD) as region:
        yield InputArena(region)
