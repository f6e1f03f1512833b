"""Segments: a table of block headers and runs of payload pages. One writer, many readers.

SegmentWriter is the worker's: it alone owns the free list and the page runs. SegmentReader is control's and
the client's. SegmentRecovery is control's, after proof that the worker is dead.
"""

import threading
from typing import Final, NamedTuple

from shm import _core
from shm.errors import RegionCorrupt
from shm.layout import (
    BLOCK_HEADER_BYTES,
    BLOCK_TABLE_OFFSET,
    PAGE_BYTES,
    VERSION_OFFSET,
    BlockHeader,
    BlockState,
    Dtype,
    RegionKind,
    block_header_offset,
    page_align,
)
from shm.pages import PageRuns
from shm.region import Backing, Region, create_region

_STATES: Final = frozenset(int(state) for state in BlockState)
_ITEMSIZES: Final = {int(dtype): dtype.itemsize for dtype in Dtype}
_BYTES_PER_BLOCK: Final = 64 << 10  # small embeddings are about this big; a header costs a thousandth of it


def segment_layout(size_bytes: int) -> tuple[int, int]:
    """(block count, payload offset) of a segment of size_bytes."""
    block_count = max(16, size_bytes // _BYTES_PER_BLOCK)
    return block_count, page_align(BLOCK_TABLE_OFFSET + block_count * BLOCK_HEADER_BYTES)


def create_segment(size_bytes: int, *, boot_id: bytes, place: int, epoch: int, backing: Backing) -> Region:
    """The region of one worker's segment (size_bytes in all, whole pages). RegionUnavailable."""
    block_count, payload_offset = segment_layout(size_bytes)
    if payload_offset + PAGE_BYTES > size_bytes:
        raise ValueError(f"a segment of {size_bytes} bytes has no room for payload")
    return create_region(
        RegionKind.SEGMENT,
        size_bytes,
        boot_id=boot_id,
        place=place,
        epoch=epoch,
        capacity=block_count,
        payload_offset=payload_offset,
        backing=backing,
        label=f"segment-{place}-{epoch}",
    )


class SegmentStatistics(NamedTuple):
    """The writer's own count of its pages and blocks."""

    total_bytes: int
    free_bytes: int
    largest_free_bytes: int
    blocks_free: int
    blocks_filling: int
    blocks_ready: int
    blocks_failed: int


class FillingBlock:
    """A block that the worker fills: rows first, then publish_rows, then ready() or fail() exactly once.

    payload: writable, nbytes long, rows x dim elements of dtype, row-major. Every byte of it must be written
    before ready(): what the pages held before belongs to somebody else.
    """

    __slots__ = (
        "_rows_ready", "_writer", "block", "dim", "dtype", "generation", "metadata_bytes", "nbytes", "offset",
        "payload", "rows",
    )  # fmt: skip

    def __init__(
        self, writer: "SegmentWriter", block: int, header: BlockHeader, dtype: Dtype, payload: memoryview
    ) -> None:
        self.block = block
        self.generation = header.generation
        self.offset = header.offset
        self.nbytes = header.nbytes
        self.rows = header.rows
        self.dim = header.dim
        self.dtype = dtype
        self.metadata_bytes = header.metadata_bytes
        self.payload = payload
        self._writer = writer
        self._rows_ready = 0

    def publish_rows(self, count: int) -> None:
        """The first `count` rows are final: readers may use them. It never shrinks."""
        if not self._rows_ready <= count <= self.rows:
            raise ValueError(f"{count} rows after {self._rows_ready}, of {self.rows}")
        if count > self._rows_ready:
            self._rows_ready = count
            self._writer.store_rows_ready(self, count)

    def ready(self) -> None:
        """All rows are final."""
        self._rows_ready = self.rows
        self._writer.finish(self, self.rows, BlockState.READY)

    def fail(self) -> None:
        """The rows will never come. Readers that wait get EncodeFailed."""
        self._writer.finish(self, self._rows_ready, BlockState.FAILED)


class SegmentWriter:
    """The one writer of a segment: allocates blocks, publishes them, frees them on control's RECLAIM.

    What is free is private memory; nothing that this class stores is read back. Threads of the worker share
    it: one lock around the free lists, held for microseconds.
    """

    def __init__(self, region: Region) -> None:
        first = region.header.payload_offset
        self._region = region
        self._memory = region.memory
        self._view = region.view
        self._lock = threading.Lock()
        self._pages = PageRuns(first // PAGE_BYTES, (region.size_bytes - first) // PAGE_BYTES)
        self._total_bytes = self._pages.statistics().total_bytes
        self._free_blocks = list(range(region.header.capacity - 1, -1, -1))
        self._generations = [0] * region.header.capacity
        self._live: dict[int, tuple[BlockState, int]] = {}  # block -> state, where its run begins

    @property
    def total_bytes(self) -> int:
        """Of all payload pages, free or not."""
        return self._total_bytes

    def fits(self, payload_nbytes: int, metadata_bytes: int) -> bool:
        """Whether an empty segment could hold this; if not, no reclaim ever helps."""
        return page_align(metadata_bytes) + page_align(payload_nbytes) <= self._total_bytes

    def allocate(
        self, payload_nbytes: int, rows: int, dim: int, dtype: Dtype, metadata: bytes
    ) -> FillingBlock | None:
        """A block in state FILLING with its metadata run in place; None when the segment is full now.

        metadata: msgpack BlockMetadata. ValueError if the shape is not payload_nbytes.
        """
        if rows < 1 or dim < 1 or rows * dim * dtype.itemsize != payload_nbytes:
            raise ValueError(f"{rows} x {dim} {dtype.label} is not {payload_nbytes} bytes")
        metadata_pages = page_align(len(metadata))
        run_bytes = metadata_pages + page_align(payload_nbytes)
        claimed = self._claim(run_bytes)
        if claimed is None:
            return None
        block, generation, run = claimed
        header = BlockHeader(
            state=BlockState.FILLING,
            change_seq=0,
            generation=generation,
            offset=run + metadata_pages,
            nbytes=payload_nbytes,
            rows=rows,
            dim=dim,
            rows_ready=0,
            dtype=dtype,
            epoch=self._region.header.epoch,
            metadata_bytes=len(metadata),
            run_bytes=run_bytes,
        )
        self._write_run_edges(run, header, metadata)
        _core.header_store(self._memory, block_header_offset(block), header.pack())
        payload = self._view[header.offset : header.offset + payload_nbytes]
        return FillingBlock(self, block, header, dtype, payload)

    def reclaim(self, block: int, generation: int) -> bool:
        """Free a block that is READY or FAILED at this generation; else nothing happens, and False."""
        with self._lock:
            live = self._live.get(block)
            if live is None or live[0] is BlockState.FILLING or self._generations[block] != generation:
                return False
            # RETIRED first: a reader that comes now sees that it is late before the pages can change owner.
            _core.header_store_state(self._memory, block_header_offset(block), BlockState.RETIRED)
            _core.header_store_state(self._memory, block_header_offset(block), BlockState.FREE)
            del self._live[block]
            self._pages.free(live[1])
            self._free_blocks.append(block)
        return True

    def statistics(self) -> SegmentStatistics:
        """Free bytes and how many blocks are in which state."""
        with self._lock:
            states = [state for state, _ in self._live.values()]
            pages = self._pages.statistics()
            return SegmentStatistics(
                total_bytes=pages.total_bytes,
                free_bytes=pages.free_bytes,
                largest_free_bytes=pages.largest_free_bytes,
                blocks_free=len(self._free_blocks),
                blocks_filling=states.count(BlockState.FILLING),
                blocks_ready=states.count(BlockState.READY),
                blocks_failed=states.count(BlockState.FAILED),
            )

    def store_rows_ready(self, filling: FillingBlock, count: int) -> None:
        """For FillingBlock. PAIRS: header_load in the readers."""
        _core.header_store_rows_ready(self._memory, block_header_offset(filling.block), count)

    def finish(self, filling: FillingBlock, rows_ready: int, state: BlockState) -> None:
        """For FillingBlock: its last state before the reclaim. ValueError the second time."""
        block = filling.block
        with self._lock:
            live_state, run = self._live.get(block, (BlockState.FREE, 0))
            if live_state is not BlockState.FILLING or self._generations[block] != filling.generation:
                raise ValueError(f"block {block} is not being filled any more")
            self._live[block] = (state, run)
            _core.header_finish(self._memory, block_header_offset(block), rows_ready, state)

    def _claim(self, run_bytes: int) -> tuple[int, int, int] | None:
        """(block, its new generation, where its run begins), or None when full."""
        with self._lock:
            if not self._free_blocks:
                return None
            run = self._pages.allocate(run_bytes)
            if run is None:
                return None
            block = self._free_blocks.pop()
            self._generations[block] += 1
            self._live[block] = (BlockState.FILLING, run)
            return block, self._generations[block], run

    def _write_run_edges(self, run: int, header: BlockHeader, metadata: bytes) -> None:
        """Metadata, and zeros where the run is neither metadata nor payload: others had these pages."""
        view = self._view
        view[run : header.offset] = metadata.ljust(header.offset - run, b"\0")
        payload_end = header.offset + header.nbytes
        run_end = run + header.run_bytes
        view[payload_end:run_end] = bytes(run_end - payload_end)


class SegmentReader:
    """Reads headers, metadata and payloads; copies every word once and checks it before use."""

    def __init__(self, region: Region) -> None:
        self._memory = region.memory
        self._region = region.header
        self._view = region.view.toreadonly()

    @property
    def block_count(self) -> int:
        """How many blocks the segment's table has."""
        return self._region.capacity

    def header(self, block: int) -> BlockHeader:
        """A consistent, range-checked copy. RegionCorrupt for an impossible header or block number."""
        if not 0 <= block < self._region.capacity:
            raise RegionCorrupt(f"block {block} of {self.block_count}")
        header = BlockHeader.unpack(_core.header_load(self._memory, block_header_offset(block)))
        problem = "" if header.state == BlockState.FREE else self._problem(header)
        if problem:
            raise RegionCorrupt(f"the {problem} in the header of block {block} is impossible")
        return header

    def payload(self, header: BlockHeader) -> memoryview:
        """The payload of a header that header() returned, read-only: rows x dim elements, row-major."""
        return self._view[header.offset : header.offset + header.nbytes]

    def metadata(self, header: BlockHeader) -> bytes:
        """A copy of the metadata run (msgpack BlockMetadata) of a header that header() returned."""
        run = header.offset - page_align(header.metadata_bytes)
        return bytes(self._view[run : run + header.metadata_bytes])

    def wait_change(self, block: int, seen_change_seq: int, timeout_ns: int) -> bool:
        """Sleep until the block's header changes from what header() returned. False at the timeout."""
        return _core.header_wait(self._memory, block_header_offset(block), seen_change_seq, timeout_ns)

    def abandoned(self) -> bool:
        """True once control has given this segment up: no lease in it exists any more."""
        return _core.word_load(self._memory, VERSION_OFFSET) == 0

    def _problem(self, header: BlockHeader) -> str:
        """The first field that cannot be, or nothing. Each number is bounded before it is used in a sum."""
        region = self._region
        if header.state not in _STATES:
            return "state"
        if header.epoch != region.epoch:
            return "epoch"
        if header.dtype not in _ITEMSIZES:
            return "dtype"
        if header.offset % PAGE_BYTES or not region.payload_offset <= header.offset <= region.size_bytes:
            return "offset"
        if header.nbytes > region.size_bytes - header.offset:
            return "nbytes"
        if header.nbytes != header.rows * header.dim * _ITEMSIZES[header.dtype]:
            return "shape"
        if header.rows_ready > header.rows:
            return "rows_ready"
        if header.metadata_bytes > header.offset - region.payload_offset:
            return "metadata_bytes"
        if header.run_bytes != page_align(header.metadata_bytes) + page_align(header.nbytes):
            return "run_bytes"
        return ""


class SegmentRecovery:
    """Control's, once the worker is proved dead: control is the segment's one writer then."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._reader = SegmentReader(region)

    def fail_filling(self) -> list[int]:
        """Every FILLING block becomes LOST and its waiters wake (WorkerLost). The blocks' numbers.

        Every other block in use has its state stored again, unchanged: the worker may have died between its
        store and its wake, and this wake is the one its readers sleep for.
        """
        lost = []
        for block in range(self._reader.block_count):
            state = self._state(block)
            if state == BlockState.FREE:
                continue
            if state == BlockState.FILLING:
                state = BlockState.LOST
                lost.append(block)
            _core.header_store_state(self._region.memory, block_header_offset(block), state)
        return lost

    def abandon(self) -> None:
        """Tell readers that hold a mapping to drop it: no lease in this segment exists any more."""
        _core.word_store(self._region.memory, VERSION_OFFSET, 0)

    def _state(self, block: int) -> int:
        # Unchecked on purpose: a dead worker's nonsense elsewhere in the header must not stop the recovery.
        raw = _core.header_load(self._region.memory, block_header_offset(block))
        return BlockHeader.unpack(raw).state
