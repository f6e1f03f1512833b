"""Control's private record of every segment, and of each block in it that somebody may still read.

A Segment is one worker's memory in one epoch. A Block enters the record when the worker first reports it
and its header has been checked (`admit`), and leaves it when nobody holds a lease any more (`reclaim`): the
living worker is told to free the run; in a dead worker's segment the run's memory goes back to the kernel,
and with the last block the whole segment. Called by `app.completions`, `app.engine`, `app.place` and
`app.sessions`, all on the event loop; only the giving back of memory runs on a thread of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from app.room import ExpectedRun
from shm.errors import RegionCorrupt
from shm.layout import (
    BlockHeader,
    BlockState,
    Completion,
    CompletionKind,
    Dtype,
    Submission,
    SubmissionKind,
    page_align,
)
from shm.messages import BlockMetadata, SegmentGrant
from shm.region import Backing, Region, punch_hole, reopen_read_only, seal_against_writers
from shm.segment import SegmentReader, SegmentRecovery

if TYPE_CHECKING:
    from app.inflight import Attempt
    from app.outbox import Outbox

PUNCH_STEP_BYTES = 16 << 20

logger = logging.getLogger(__name__)
# A record may be older than what the header says by now: a SHAPE_KNOWN is followed by the end.
_REPORTED_STATES: Final[dict[CompletionKind, tuple[BlockState, ...]]] = {
    CompletionKind.SHAPE_KNOWN: (BlockState.FILLING, BlockState.READY, BlockState.FAILED),
    CompletionKind.READY: (BlockState.READY,),
    CompletionKind.FAILED: (),
}
_decode_metadata = msgspec.msgpack.Decoder(BlockMetadata).decode


@dataclass(slots=True, eq=False)
class Block:
    """block@generation of a segment, as its checked header said. The payload is rows x dim of dtype.

    attempt is what still fills it; None once its READY or FAILED is known (or its worker's death).
    """

    segment: Segment
    index: int
    generation: int
    offset: int
    nbytes: int
    rows: int
    dim: int
    dtype: Dtype
    metadata: BlockMetadata
    run_offset: int
    run_bytes: int
    metadata_bytes: int
    attempt: Attempt | None


@dataclass(slots=True, eq=False)
class Segment:
    """One worker's blocks in one epoch.

    outbox is the worker's, None after proof of its death. read_only_fd is what readers get, -1 until the
    worker has mapped the region. blocks: by index, those that control knows to be in use; used_bytes: of
    their runs together.
    """

    place: int
    epoch: int
    region: Region
    outbox: Outbox | None
    reader: SegmentReader
    read_only_fd: int = -1
    blocks: dict[int, Block] = field(default_factory=dict)
    used_bytes: int = 0
    expected_run: ExpectedRun = field(default_factory=ExpectedRun)

    @property
    def free_bytes(self) -> int:
        """Bytes outside the runs that control knows to be in use."""
        return self.payload_bytes - self.used_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes that all runs together can have."""
        return self.region.size_bytes - self.region.header.payload_offset

    @property
    def key(self) -> tuple[int, int]:
        """(place, epoch): no two segments of a boot have the same."""
        return self.place, self.epoch

    @property
    def grant(self) -> SegmentGrant:
        """What a session is told beside the read-only descriptor."""
        return SegmentGrant(self.place, self.epoch, self.region.size_bytes)

    def admit(self, record: Completion, attempt: Attempt) -> Block:
        """The block that a worker's first record about it names; RegionCorrupt unless everything agrees."""
        if record.block in self.blocks:
            raise RegionCorrupt(f"block {record.block} was reported while it is in use")
        header = self._header_of(record)
        if header.state not in _REPORTED_STATES[record.kind]:
            raise RegionCorrupt(f"block {record.block} is reported {record.kind.name}, but not by its header")
        _check_shape(record, header)
        metadata = self._metadata_of(header, attempt.flight.job.item_count)
        run_offset = header.offset - page_align(header.metadata_bytes)
        block = Block(
            self, record.block, header.generation, header.offset, header.nbytes, header.rows, header.dim,
            Dtype(header.dtype), metadata, run_offset, header.run_bytes, header.metadata_bytes, attempt,
        )  # fmt: skip
        self.blocks[block.index] = block
        self.used_bytes += block.run_bytes
        self.expected_run.learn(block.run_bytes)
        return block

    def confirm(self, block: Block, record: Completion, state: BlockState) -> None:
        """RegionCorrupt unless a later record, and the header now, speak of this block in this state."""
        if (record.block, record.generation) != (block.index, block.generation):
            raise RegionCorrupt("the ticket's records name two blocks")
        header = self._header_of(record)
        if header.state != state:
            raise RegionCorrupt(f"block {block.index} is reported {state.name} but its header says otherwise")
        if state is BlockState.READY:
            _check_shape(record, header)

    def _header_of(self, record: Completion) -> BlockHeader:
        """The header's checked copy, which must be of the record's generation and of this epoch."""
        header = self.reader.header(record.block)
        if (header.generation, header.epoch) != (record.generation, self.epoch):
            raise RegionCorrupt(f"block {record.block} is not of the generation or epoch that was reported")
        return header

    def _metadata_of(self, header: BlockHeader, item_count: int) -> BlockMetadata:
        try:
            metadata = _decode_metadata(self.reader.metadata(header))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RegionCorrupt("a block's metadata cannot be decoded") from None
        if len(metadata.items) != item_count:
            raise RegionCorrupt(f"a block has rows of {len(metadata.items)} items, {item_count} were sent")
        for item in metadata.items:
            if item.row_start < 0 or item.row_count < 0 or item.row_start + item.row_count > header.rows:
                raise RegionCorrupt("an item's rows are outside its block")
        return metadata


def _check_shape(record: Completion, header: BlockHeader) -> None:
    """RegionCorrupt unless the record repeats the header, whose shape and ranges the reader has checked."""
    reported = (record.offset, record.nbytes, record.rows, record.dim, record.dtype, record.metadata_bytes)
    stored = (header.offset, header.nbytes, header.rows, header.dim, header.dtype, header.metadata_bytes)
    if reported != stored:
        raise RegionCorrupt("a record and its block's header disagree")


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    """One segment from outside. used_bytes and free_bytes are whole runs, as control knows them."""

    place: int
    epoch: int
    alive: bool
    blocks: int
    used_bytes: int
    free_bytes: int


class Segments:
    """All segments by (place, epoch). on_freed(place) is called when a dead one lets go of memory."""

    def __init__(self, backing: Backing, on_freed: Callable[[int], None]) -> None:
        self._backing = backing
        self._segments: dict[tuple[int, int], Segment] = {}
        self._on_freed = on_freed
        # What walks or frees a whole segment takes too long for the event loop. One thread: a segment is
        # recovered before its holes are punched, and closed after that.
        self._janitor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segments")

    def add(self, place: int, epoch: int, region: Region, outbox: Outbox) -> Segment:
        """Take over a region that `app.place` created for a worker about to start."""
        segment = Segment(place, epoch, region, outbox, SegmentReader(region))
        self._segments[place, epoch] = segment
        return segment

    def open_to_readers(self, segment: Segment) -> None:
        """The worker has mapped it: from now on nobody can map it writable, and readers may have it."""
        if self._backing is Backing.MEMFD:
            seal_against_writers(segment.region.fd)
        segment.read_only_fd = reopen_read_only(segment.region.fd)

    def find(self, place: int, epoch: int) -> Segment | None:
        """The segment that a handle names, if it still exists."""
        return self._segments.get((place, epoch))

    def readable(self) -> Iterator[Segment]:
        """Those that readers may map."""
        return (segment for segment in self._segments.values() if segment.read_only_fd >= 0)

    def all(self) -> list[Segment]:
        """Those that exist, in order of place and epoch."""
        return [segment for _, segment in sorted(self._segments.items())]

    def dead(self, place: int) -> list[Segment]:
        """Those of this place whose workers are dead, and that somebody may still read."""
        return [segment for segment in self.all() if segment.place == place and segment.outbox is None]

    def kept_bytes(self, dead: Segment) -> int:
        """The memory that a dead worker's segment still takes: its leased runs, or all of a memfd."""
        return dead.used_bytes if self._backing is Backing.POSIX else dead.region.size_bytes

    def recover(self, segment: Segment) -> list[Block]:
        """After proof of its worker's death: the known blocks that were still being filled.

        Soon every block in FILLING is LOST and its readers are woken, and the memory of all runs that
        control does not know has gone back to the kernel.
        """
        segment.outbox = None
        self._janitor.submit(_logged, SegmentRecovery(segment.region).fail_filling)
        self._punch_unknown_runs(segment)
        unfinished = [block for block in segment.blocks.values() if block.attempt is not None]
        for block in unfinished:
            block.attempt = None
        return unfinished

    def reclaim(self, block: Block) -> None:
        """Forget a block that has ended and that nobody may read, and have its run freed."""
        segment = block.segment
        del segment.blocks[block.index]
        segment.used_bytes -= block.run_bytes
        if segment.outbox is not None:
            self.reclaim_run(segment, block.index, block.generation)
        else:
            self._punch(segment, block.run_offset, block.run_bytes)
            self.drop_if_unused(segment)
            self._on_freed(segment.place)

    def reclaim_run(self, segment: Segment, index: int, generation: int) -> None:
        """Tell a living worker that the block is free again."""
        if segment.outbox is not None:
            segment.outbox.send(Submission(SubmissionKind.RECLAIM, block=index, generation=generation))

    def drop_if_unused(self, segment: Segment) -> None:
        """Let go of a dead worker's segment once no block in it is known. Readers keep their own mappings."""
        exists = self.find(segment.place, segment.epoch) is segment
        if exists and segment.outbox is None and not segment.blocks:
            self._drop(segment)

    def close(self) -> None:
        """Let go of everything; all workers are dead by now."""
        for segment in self.all():
            self._drop(segment)
        self._janitor.shutdown()

    def statistics(self) -> list[SegmentStatistics]:
        """Every segment, in order of place and epoch."""
        return [
            SegmentStatistics(
                segment.place,
                segment.epoch,
                segment.outbox is not None,
                len(segment.blocks),
                segment.used_bytes,
                segment.free_bytes,
            )
            for segment in self.all()
        ]

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment.place, segment.epoch]
        self._janitor.submit(_logged, partial(_close, segment))

    def _punch_unknown_runs(self, segment: Segment) -> None:
        start = segment.region.header.payload_offset
        for block in sorted(segment.blocks.values(), key=lambda block: block.run_offset):
            self._punch(segment, start, block.run_offset - start)
            start = max(start, block.run_offset + block.run_bytes)
        self._punch(segment, start, segment.region.size_bytes - start)

    def _punch(self, segment: Segment, offset: int, nbytes: int) -> None:
        # A memfd is sealed against this; its memory goes back when the whole segment does.
        if self._backing is not Backing.POSIX:
            return
        # In steps, because madvise holds the interpreter lock.
        for start in range(offset, offset + nbytes, PUNCH_STEP_BYTES):
            step_bytes = min(PUNCH_STEP_BYTES, offset + nbytes - start)
            self._janitor.submit(_logged, partial(punch_hole, segment.region, start, step_bytes))


def _logged(chore: Callable[[], object]) -> None:
    """Nobody waits for a chore of the janitor: what goes wrong there is said here."""
    try:
        chore()
    except Exception:  # the edge of the thread: the chores after it must still be done
        logger.exception("giving back a segment's memory failed")


def _close(segment: Segment) -> None:
    # Readers that still have it mapped are told, so that they let go of the memory too.
    SegmentRecovery(segment.region).abandon()
    segment.region.close()
    if segment.read_only_fd >= 0:
        os.close(segment.read_only_fd)
