"""shm.segment: a block's life at the writer, what readers see of it, and recovery after a death."""

import os
import signal
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import _core
from shm.errors import RegionCorrupt
from shm.layout import (
    BLOCK_HEADER_BYTES,
    PAGE_BYTES,
    BlockHeader,
    BlockState,
    Dtype,
    RegionKind,
    block_header_offset,
)
from shm.region import Backing, Region, attach_region, reopen_read_only
from shm.segment import (
    FillingBlock,
    SegmentReader,
    SegmentRecovery,
    SegmentWriter,
    create_segment,
    segment_layout,
)
from tests.shm.processes import A_LONG_TIME_NS, forked

SIZE_BYTES = 1 << 20
ROW_BYTES = 64 * 4


@pytest.fixture
def region() -> Iterator[Region]:
    with create_segment(SIZE_BYTES, boot_id=bytes(16), place=2, epoch=9, backing=Backing.POSIX) as region:
        yield region


@pytest.fixture
def reader(region: Region) -> Iterator[SegmentReader]:
    with attach_region(reopen_read_only(region.fd), RegionKind.SEGMENT, writable=False) as mapped:
        yield SegmentReader(mapped)


def fill(writer: SegmentWriter, rows: int = 4, metadata: bytes = b"metadata") -> FillingBlock:
    block = writer.allocate(rows * ROW_BYTES, rows, 64, Dtype.FLOAT32, metadata)
    assert block is not None
    return block


@pytest.mark.parametrize("size_bytes", [1 << 20, 256 << 20, 1 << 30, 3 << 30])
def test_the_table_is_a_thousandth_of_a_segment_and_the_payload_starts_behind_it(size_bytes: int) -> None:
    block_count, payload_offset = segment_layout(size_bytes)
    assert payload_offset % PAGE_BYTES == 0
    assert block_header_offset(block_count) <= payload_offset
    assert payload_offset - 2 * PAGE_BYTES <= size_bytes // 1000


def test_a_segment_without_room_for_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        create_segment(2 * PAGE_BYTES, boot_id=bytes(16), place=0, epoch=0, backing=Backing.POSIX)


def test_a_reader_sees_a_block_fill_row_by_row(region: Region, reader: SegmentReader) -> None:
    writer = SegmentWriter(region)
    block = fill(writer)
    header = reader.header(block.block)
    assert (header.state, header.generation, header.rows_ready, header.epoch) == (BlockState.FILLING, 1, 0, 9)
    assert (header.rows, header.dim, header.dtype, header.nbytes) == (4, 64, Dtype.FLOAT32, 4 * ROW_BYTES)
    assert reader.metadata(header) == b"metadata"
    block.payload[: 2 * ROW_BYTES] = b"\x11" * 2 * ROW_BYTES
    block.publish_rows(2)
    assert reader.header(block.block).rows_ready == 2
    block.payload[2 * ROW_BYTES :] = b"\x22" * 2 * ROW_BYTES
    block.ready()
    header = reader.header(block.block)
    assert (header.state, header.rows_ready) == (BlockState.READY, 4)
    assert bytes(reader.payload(header)) == b"\x11" * 2 * ROW_BYTES + b"\x22" * 2 * ROW_BYTES
    assert reader.payload(header).readonly


def test_a_run_shows_nothing_of_the_request_before(region: Region, reader: SegmentReader) -> None:
    writer = SegmentWriter(region)
    payload_offset = region.header.payload_offset
    region.view[payload_offset:] = b"\xa5" * (SIZE_BYTES - payload_offset)
    block = fill(writer, rows=1)
    block.payload[:] = b"\x01" * ROW_BYTES
    block.ready()
    header = reader.header(block.block)
    run = header.offset - PAGE_BYTES
    assert header.run_bytes == 2 * PAGE_BYTES
    assert b"\xa5" not in bytes(region.view[run : run + header.run_bytes])


def test_a_full_segment_gives_none_and_recovers_after_a_reclaim(region: Region) -> None:
    writer = SegmentWriter(region)
    blocks = []
    while (block := writer.allocate(16 * ROW_BYTES, 16, 64, Dtype.FLOAT32, b"m")) is not None:
        block.ready()
        blocks.append(block)
    assert len(blocks) == segment_layout(SIZE_BYTES)[0]
    assert writer.statistics().blocks_free == 0
    assert writer.reclaim(blocks[5].block, blocks[5].generation)
    again = fill(writer)
    assert (again.block, again.generation) == (blocks[5].block, 2)


def test_no_pages_left_gives_none_and_loses_no_block(region: Region) -> None:
    writer = SegmentWriter(region)
    total_bytes = writer.statistics().total_bytes
    rows = (total_bytes - PAGE_BYTES) // ROW_BYTES
    whole = fill(writer, rows=rows)
    before = writer.statistics()
    assert before.free_bytes == 0
    assert writer.allocate(ROW_BYTES, 1, 64, Dtype.FLOAT32, b"") is None
    assert writer.statistics() == before
    whole.fail()
    assert writer.reclaim(whole.block, whole.generation)
    assert writer.statistics().free_bytes == total_bytes


def test_fits_says_what_an_empty_segment_could_hold(region: Region) -> None:
    writer = SegmentWriter(region)
    total_bytes = writer.statistics().total_bytes
    fill(writer)
    assert writer.fits(total_bytes - PAGE_BYTES, 10)
    assert not writer.fits(total_bytes, 10)
    assert not writer.fits(total_bytes + 1, 0)


def test_reclaim_takes_only_a_finished_block_of_that_generation(
    region: Region, reader: SegmentReader
) -> None:
    writer = SegmentWriter(region)
    block = fill(writer)
    assert not writer.reclaim(block.block, block.generation)
    block.ready()
    assert not writer.reclaim(block.block, block.generation + 1)
    assert not writer.reclaim(block.block + 1, 1)
    assert not writer.reclaim(2**32 - 1, 1)
    assert reader.header(block.block).state == BlockState.READY
    assert writer.reclaim(block.block, block.generation)
    assert not writer.reclaim(block.block, block.generation)
    assert reader.header(block.block).state == BlockState.FREE


def test_a_block_ends_once_and_its_rows_only_grow(region: Region) -> None:
    block = fill(SegmentWriter(region))
    block.publish_rows(3)
    for count in (2, 5):
        with pytest.raises(ValueError, match="rows after 3"):
            block.publish_rows(count)
    block.fail()
    for end in (block.ready, block.fail):
        with pytest.raises(ValueError, match="not being filled"):
            end()


@pytest.mark.parametrize(("rows", "dim", "nbytes"), [(0, 64, 0), (4, 0, 0), (4, 64, 1000), (-1, -64, 256)])
def test_a_shape_must_be_its_bytes(region: Region, rows: int, dim: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="is not"):
        SegmentWriter(region).allocate(nbytes, rows, dim, Dtype.FLOAT32, b"")


def test_threads_share_a_writer_without_handing_a_page_out_twice(region: Region) -> None:
    writer = SegmentWriter(region)
    torn: list[int] = []

    def live(mark: int) -> None:
        for _ in range(300):
            block = writer.allocate(ROW_BYTES, 1, 64, Dtype.FLOAT32, b"")
            assert block is not None
            block.payload[:] = bytes([mark]) * ROW_BYTES
            block.ready()
            if bytes(block.payload) != bytes([mark]) * ROW_BYTES:
                torn.append(mark)
            assert writer.reclaim(block.block, block.generation)

    threads = [threading.Thread(target=live, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert writer.statistics().free_bytes == writer.statistics().total_bytes


def test_a_waiting_process_wakes_at_each_change(region: Region, reader: SegmentReader) -> None:
    writer = SegmentWriter(region)
    block = fill(writer)

    def wait_for_ready() -> None:
        while (header := reader.header(block.block)).state != BlockState.READY:
            assert reader.wait_change(block.block, header.change_seq, A_LONG_TIME_NS)
        assert bytes(reader.payload(header)) == b"\x33" * 4 * ROW_BYTES

    with forked(wait_for_ready) as child:
        block.payload[:] = b"\x33" * 4 * ROW_BYTES
        for rows in range(1, 5):
            block.publish_rows(rows)
        block.ready()
        assert child.wait() == 0


def test_a_wait_for_nothing_ends_with_its_timeout(region: Region, reader: SegmentReader) -> None:
    block = fill(SegmentWriter(region))
    assert not reader.wait_change(block.block, reader.header(block.block).change_seq, 1_000_000)


def test_a_reader_wakes_whose_worker_died_between_the_state_and_the_wake(
    region: Region, reader: SegmentReader
) -> None:
    block = fill(SegmentWriter(region))
    seen = reader.header(block.block)
    # What the kill left behind: READY is stored, change_seq is not, nobody was woken.
    struct.pack_into("<I", region.memory, block_header_offset(block.block), BlockState.READY)
    woken: list[bool] = []
    waiter = threading.Thread(
        target=lambda: woken.append(reader.wait_change(block.block, seen.change_seq, A_LONG_TIME_NS))
    )
    waiter.start()
    assert SegmentRecovery(region).fail_filling() == []
    waiter.join()
    assert woken == [True]
    assert reader.header(block.block).state == BlockState.READY


def test_after_a_death_what_was_being_filled_is_lost_and_the_rest_stays(
    region: Region, reader: SegmentReader
) -> None:
    def worker() -> None:
        writer = SegmentWriter(region)
        fill(writer).ready()
        fill(writer)
        fill(writer).fail()
        fill(writer).publish_rows(2)
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(worker) as child:
        assert child.wait() == -signal.SIGKILL
    seen = reader.header(1).change_seq
    assert SegmentRecovery(region).fail_filling() == [1, 3]
    assert [reader.header(block).state for block in range(5)] == [
        BlockState.READY, BlockState.LOST, BlockState.FAILED, BlockState.LOST, BlockState.FREE,
    ]  # fmt: skip
    assert reader.wait_change(1, seen, A_LONG_TIME_NS)


def test_an_abandoned_segment_says_so_to_those_who_have_it_mapped(
    region: Region, reader: SegmentReader
) -> None:
    assert not reader.abandoned()
    SegmentRecovery(region).abandon()
    assert reader.abandoned()
    with pytest.raises(RegionCorrupt):
        attach_region(reopen_read_only(region.fd), RegionKind.SEGMENT, writable=False)


@pytest.mark.parametrize("block", [-1, 16, 2**32 - 1])
def test_a_block_number_outside_the_table_is_corrupt(reader: SegmentReader, block: int) -> None:
    with pytest.raises(RegionCorrupt, match="of 16"):
        reader.header(block)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", 6), ("state", 2**32 - 1), ("epoch", 8), ("dtype", 0), ("dtype", 4), ("offset", 0),
        ("offset", 4097), ("offset", SIZE_BYTES), ("offset", 2**64 - PAGE_BYTES), ("nbytes", 0),
        ("nbytes", 2**64 - 1), ("rows", 5), ("dim", 2**32 - 1), ("rows_ready", 5),
        ("metadata_bytes", 2**32 - 1), ("run_bytes", 2**64 - 1),
    ],
)  # fmt: skip
def test_an_impossible_header_is_corrupt(
    region: Region, reader: SegmentReader, field: str, value: int
) -> None:
    block = fill(SegmentWriter(region))
    header = reader.header(block.block)._replace(**{field: value})
    _core.header_store(region.memory, block_header_offset(block.block), header.pack())
    with pytest.raises(RegionCorrupt, match="impossible"):
        reader.header(block.block)


U64 = st.one_of(
    st.integers(0, 2**64 - 1), st.integers(0, 2 * SIZE_BYTES // PAGE_BYTES).map(lambda n: n * PAGE_BYTES)
)
U32 = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 70))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Region]:
    with create_segment(SIZE_BYTES, boot_id=bytes(16), place=0, epoch=1, backing=Backing.POSIX) as region:
        yield region


@settings(max_examples=500, deadline=None)
@given(
    st.tuples(st.integers(1, 6), U32, U64, U64, U64, U32, U32, U32, st.integers(0, 4), st.just(1), U32, U64)
)
def test_any_header_is_corrupt_or_lies_inside_the_segment(scratch: Region, words: tuple[int, ...]) -> None:
    raw = struct.pack("<IIQQQIIIIIIQ", *words)
    scratch.view[block_header_offset(0) : block_header_offset(0) + BLOCK_HEADER_BYTES] = raw
    reader = SegmentReader(scratch)
    try:
        header = reader.header(0)
    except RegionCorrupt:
        return
    assert header == BlockHeader(*words)
    assert (
        len(reader.payload(header))
        == header.nbytes
        == header.rows * header.dim * Dtype(header.dtype).itemsize
    )
    assert len(reader.metadata(header)) == header.metadata_bytes
    assert header.offset - scratch.header.payload_offset >= header.metadata_bytes
