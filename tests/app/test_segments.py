"""app.segments: what control believes of a worker's blocks, and how memory goes back."""

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from app.segments import Segments
from shm import _core
from shm.arena import InputArena
from shm.errors import RegionCorrupt
from shm.layout import (
    BlockState,
    CompletionKind,
    Submission,
    SubmissionKind,
    block_header_offset,
)
from shm.region import Backing
from shm.segment import SegmentReader, create_segment
from tests.app.support import (
    BOOT_ID,
    MEBIBYTE,
    HandWorker,
    attempt_of,
    hand_workers,
    make_job,
    on_loop,
    record_of,
    small_arena,
    until,
)


@dataclass
class Scene:
    """The segments of one worker that is played by hand."""

    segments: Segments
    hand: HandWorker
    arena: InputArena
    dropped: list[int] = field(default_factory=list)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    dropped: list[int] = []
    async with hand_workers(on_freed=dropped.append) as (segments, [hand]):
        with small_arena() as arena:
            yield Scene(segments, hand, arena, dropped)


@on_loop
async def test_an_honest_record_admits_its_block() -> None:
    async with scene() as here:
        filling = here.hand.fill(rows=3, dim=5)
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        block = here.hand.segment.admit(record_of(CompletionKind.SHAPE_KNOWN, 1, filling), attempt)
        assert (block.rows, block.dim, block.nbytes, block.attempt) == (3, 5, 60, attempt)
        assert block.metadata.items[0].row_count == 3
        assert here.segments.statistics()[0].used_bytes == block.run_bytes == 8192


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("block", 1),
        ("block", 1 << 31),
        ("generation", 2),
        ("offset", 0),
        ("offset", 1 << 63),
        ("nbytes", 60 + 4096),
        ("rows", 4),
        ("dim", 6),
        ("dtype", 2),
        ("metadata_bytes", 0),
    ],
)
@on_loop
async def test_a_record_that_disagrees_with_the_header_is_corrupt(word: str, value: int) -> None:
    async with scene() as here:
        filling = here.hand.fill(rows=3, dim=5)
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        record = record_of(CompletionKind.SHAPE_KNOWN, 1, filling)._replace(**{word: value})
        with pytest.raises(RegionCorrupt):
            here.hand.segment.admit(record, attempt)
        assert here.hand.segment.blocks == {}


@on_loop
async def test_rows_of_another_number_of_items_are_corrupt() -> None:
    async with scene() as here:
        filling = here.hand.fill(items=2)
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"only one"))
        with pytest.raises(RegionCorrupt):
            here.hand.segment.admit(record_of(CompletionKind.SHAPE_KNOWN, 1, filling), attempt)


@on_loop
async def test_a_block_in_use_cannot_be_reported_again() -> None:
    async with scene() as here:
        record = record_of(CompletionKind.SHAPE_KNOWN, 1, here.hand.fill())
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        here.hand.segment.admit(record, attempt)
        with pytest.raises(RegionCorrupt):
            here.hand.segment.admit(record, attempt)


@on_loop
async def test_ready_is_believed_only_when_the_header_says_so() -> None:
    async with scene() as here:
        filling = here.hand.fill()
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        block = here.hand.segment.admit(record_of(CompletionKind.SHAPE_KNOWN, 1, filling), attempt)
        ready = record_of(CompletionKind.READY, 1, filling)
        with pytest.raises(RegionCorrupt):
            here.hand.segment.confirm(block, ready, BlockState.READY)
        filling.ready()
        here.hand.segment.confirm(block, ready, BlockState.READY)


@on_loop
async def test_a_living_worker_is_told_to_reclaim() -> None:
    async with scene() as here:
        filling = here.hand.fill()
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        block = here.hand.segment.admit(record_of(CompletionKind.SHAPE_KNOWN, 1, filling), attempt)
        here.segments.reclaim(block)
        expected = Submission(SubmissionKind.RECLAIM, block=block.index, generation=block.generation)
        assert here.hand.taken() == [expected]
        assert here.hand.segment.blocks == {}


@on_loop
async def test_a_dead_workers_unfinished_blocks_are_lost_and_finished_ones_stay() -> None:
    async with scene() as here:
        job = make_job(here.arena, "key", b"item")
        finished, unfinished = here.hand.fill(), here.hand.fill()
        records = [record_of(CompletionKind.SHAPE_KNOWN, 1, filling) for filling in (finished, unfinished)]
        blocks = [here.hand.segment.admit(record, attempt_of(here.hand, job)) for record in records]
        finished.ready()
        blocks[0].attempt = None
        await here.hand.die()
        assert here.segments.recover(here.hand.segment) == [blocks[1]]
        reader = here.hand.segment.reader
        await until(lambda: reader.header(unfinished.block).state == BlockState.LOST)
        assert reader.header(finished.block).state == BlockState.READY


@on_loop
async def test_a_dead_workers_segment_goes_with_its_last_block() -> None:
    async with scene() as here:
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        record = record_of(CompletionKind.SHAPE_KNOWN, 1, here.hand.fill())
        block = here.hand.segment.admit(record, attempt)
        mapped_by_a_reader = SegmentReader(here.hand.worker_segment)
        await here.hand.die()
        here.segments.recover(here.hand.segment)
        here.segments.drop_if_unused(here.hand.segment)
        assert here.segments.find(0, 1) is here.hand.segment
        here.segments.reclaim(block)
        assert here.segments.find(0, 1) is None
        assert here.dropped == [0]
        await until(mapped_by_a_reader.abandoned)


@on_loop
async def test_a_dead_workers_unused_memory_goes_back_to_the_kernel() -> None:
    region = create_segment(4 * MEBIBYTE, boot_id=BOOT_ID, place=0, epoch=1, backing=Backing.POSIX)
    watched = os.dup(region.fd)
    segments = Segments(Backing.POSIX, lambda place: None)
    async with hand_workers() as (_, [hand]):
        segment = segments.add(0, 1, region, hand.worker.outbox)
        assert os.fstat(watched).st_blocks * 512 == region.size_bytes
        segments.recover(segment)
        await until(lambda: os.fstat(watched).st_blocks * 512 == region.header.payload_offset)
    segments.close()
    os.close(watched)


@on_loop
async def test_readers_get_what_nobody_can_map_writable() -> None:
    async with scene() as here:
        for fd in (here.hand.segment.read_only_fd, here.hand.segment.region.fd):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        assert [segment.grant.index for segment in here.segments.readable()] == [0]


@on_loop
async def test_a_header_that_its_worker_scribbled_over_is_corrupt() -> None:
    async with scene() as here:
        filling = here.hand.fill()
        record = record_of(CompletionKind.SHAPE_KNOWN, 1, filling)
        attempt = attempt_of(here.hand, make_job(here.arena, "key", b"item"))
        offset = block_header_offset(filling.block)
        header = bytearray(_core.header_load(here.hand.worker_segment.memory, offset))
        header[16:24] = (1 << 62).to_bytes(8, "little")
        here.hand.worker_segment.view[offset : offset + 64] = header
        with pytest.raises(RegionCorrupt):
            here.hand.segment.admit(record._replace(offset=1 << 62), attempt)
