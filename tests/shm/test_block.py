"""Block headers: stored in order, loaded whole, waited for through a read-only mapping."""

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from shm._core import (
    header_finish,
    header_load,
    header_store,
    header_store_rows_ready,
    header_store_state,
    header_wait,
)
from shm.layout import BlockHeader, BlockState
from tests.shm.processes import A_LONG_TIME_NS, forked

OFFSET = 4096
LOADS = 100_000
REFILL_STATES = {BlockState.FREE, BlockState.FILLING, BlockState.READY, BlockState.RETIRED}


@dataclass
class Segment:
    """One memfd, mapped as its worker and as a reader map it."""

    writable: mmap.mmap
    read_only: mmap.mmap

    def load(self) -> BlockHeader:
        return BlockHeader.unpack(header_load(self.read_only, OFFSET))


@pytest.fixture
def segment() -> Iterator[Segment]:
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, 8192)
    with (
        mmap.mmap(descriptor, 8192) as writable,
        mmap.mmap(descriptor, 8192, prot=mmap.PROT_READ) as read_only,
    ):
        os.close(descriptor)
        yield Segment(writable, read_only)


def numbered(number: int, state: BlockState = BlockState.FILLING) -> BlockHeader:
    """A header whose every field follows from its generation."""
    return BlockHeader(
        state=state,
        change_seq=0,
        generation=number,
        offset=number * 4096,
        nbytes=number * 3,
        rows=number & 0xFFFF,
        dim=number & 0xFFF,
        rows_ready=0,
        dtype=number % 3 + 1,
        epoch=number & 0xFF,
        metadata_bytes=number & 0xFFFFF,
        run_bytes=number * 5,
    )


def test_a_stored_header_is_loaded_field_by_field(segment: Segment) -> None:
    header_store(segment.writable, OFFSET, numbered(77).pack())
    loaded = segment.load()
    assert loaded._replace(change_seq=0) == numbered(77)
    assert loaded.change_seq == 2
    assert bytes(segment.read_only[OFFSET : OFFSET + 64]) == loaded.pack()


def test_state_and_rows_ready_change_alone_and_bump_the_number(segment: Segment) -> None:
    header_store(segment.writable, OFFSET, numbered(5).pack())
    header_store_rows_ready(segment.writable, OFFSET, 3)
    assert segment.load() == numbered(5)._replace(rows_ready=3, change_seq=3)
    header_store_state(segment.writable, OFFSET, BlockState.READY)
    assert segment.load() == numbered(5, BlockState.READY)._replace(rows_ready=3, change_seq=4)


def test_the_last_rows_and_the_state_come_as_one_change(segment: Segment) -> None:
    header_store(segment.writable, OFFSET, numbered(5).pack())
    header_finish(segment.writable, OFFSET, rows_ready=5, state=BlockState.READY)
    assert segment.load() == numbered(5, BlockState.READY)._replace(rows_ready=5, change_seq=3)


def test_the_change_number_passes_the_end_of_32_bits(segment: Segment) -> None:
    segment.writable[OFFSET + 4 : OFFSET + 8] = b"\xff" * 4
    header_store_state(segment.writable, OFFSET, BlockState.READY)
    assert segment.load().change_seq == 0


def test_a_reader_cannot_store(segment: Segment) -> None:
    with pytest.raises(BufferError):
        header_store_state(segment.read_only, OFFSET, BlockState.READY)
    with pytest.raises(BufferError):
        header_store_rows_ready(segment.read_only, OFFSET, 1)
    with pytest.raises(BufferError):
        header_finish(segment.read_only, OFFSET, 1, BlockState.READY)
    with pytest.raises(BufferError):
        header_store(segment.read_only, OFFSET, numbered(1).pack())


@pytest.mark.parametrize("offset", [-8, 4, 8192 - 56, 8192, 2**63 - 8, 2**64])
def test_a_header_outside_the_segment_or_unaligned_is_refused(segment: Segment, offset: int) -> None:
    for use in (
        lambda: header_load(segment.read_only, offset),
        lambda: header_store(segment.writable, offset, numbered(1).pack()),
        lambda: header_store_state(segment.writable, offset, 1),
        lambda: header_store_rows_ready(segment.writable, offset, 1),
        lambda: header_finish(segment.writable, offset, 1, 1),
        lambda: header_wait(segment.read_only, offset, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"offset|inside|aligned"):
            use()


def test_only_64_bytes_are_a_header_and_only_32_bits_a_state(segment: Segment) -> None:
    with pytest.raises(ValueError, match="64"):
        header_store(segment.writable, OFFSET, bytes(63))
    with pytest.raises(ValueError, match="32-bit"):
        header_store_state(segment.writable, OFFSET, 2**32)
    with pytest.raises(ValueError, match="64-bit"):
        header_store_state(segment.writable, OFFSET, -1)


def test_wait_returns_at_once_when_the_number_has_moved_and_false_at_the_timeout(segment: Segment) -> None:
    assert header_wait(segment.read_only, OFFSET, seen_change_seq=9, timeout_ns=0)
    assert not header_wait(segment.read_only, OFFSET, seen_change_seq=0, timeout_ns=0)
    assert not header_wait(segment.read_only, OFFSET, seen_change_seq=0, timeout_ns=1_000_000)


def test_every_waiter_in_every_process_is_woken_by_a_change(segment: Segment) -> None:
    ready_read, ready_write = os.pipe()

    def wait_for_ready() -> None:
        os.write(ready_write, b".")
        while (header := segment.load()).state != BlockState.READY:
            assert header_wait(segment.read_only, OFFSET, header.change_seq, A_LONG_TIME_NS)

    header_store(segment.writable, OFFSET, numbered(1).pack())
    with forked(wait_for_ready) as first, forked(wait_for_ready) as second:
        assert os.read(ready_read, 1) + os.read(ready_read, 1) == b".."
        header_store_rows_ready(segment.writable, OFFSET, 1)
        header_store_state(segment.writable, OFFSET, BlockState.READY)
        assert (first.wait(), second.wait()) == (0, 0)
    os.close(ready_read)
    os.close(ready_write)


def test_no_change_is_slept_through(segment: Segment) -> None:
    """The writer moves on only when the reader has answered: one lost wake-up and both stand still."""
    changes = 20_000

    def answer_every_change() -> None:
        for number in range(1, changes + 1):
            while (header := segment.load()).rows_ready < number:
                assert header_wait(segment.read_only, OFFSET, header.change_seq, A_LONG_TIME_NS)
            header_store_rows_ready(segment.writable, 0, number)  # the reader's own answer, in another header

    with forked(answer_every_change) as child:
        for number in range(1, changes + 1):
            header_store_rows_ready(segment.writable, OFFSET, number)
            while (answer := BlockHeader.unpack(header_load(segment.read_only, 0))).rows_ready < number:
                assert header_wait(segment.read_only, 0, answer.change_seq, A_LONG_TIME_NS)
        assert child.wait() == 0


def test_wait_goes_on_after_a_signal_and_without_the_interpreter_lock(segment: Segment) -> None:
    handled = threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        header_store_state(segment.writable, OFFSET, BlockState.READY)

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    assert main is not None
    with ThreadPoolExecutor(1) as thread:
        # Sent before or during the wait: both must end it.
        thread.submit(signal.pthread_kill, main, signal.SIGUSR1)
        assert header_wait(segment.read_only, OFFSET, 0, A_LONG_TIME_NS)
    signal.signal(signal.SIGUSR1, before)
    assert handled.is_set()


def refill_for_ever(segment: Segment, generation: int) -> None:
    """A worker that reuses one block as fast as it can."""
    while True:
        generation += 1
        header_store(segment.writable, OFFSET, numbered(generation).pack())
        header_store_state(segment.writable, OFFSET, BlockState.READY)
        header_store_state(segment.writable, OFFSET, BlockState.RETIRED)
        header_store_state(segment.writable, OFFSET, BlockState.FREE)


def assert_whole(header: BlockHeader) -> None:
    """Free, or every field is its generation's."""
    if header.state != BlockState.FREE:
        assert header._replace(state=0, change_seq=0) == numbered(header.generation, BlockState.FREE)


def test_a_block_refilled_under_the_reader_is_never_seen_half(segment: Segment) -> None:
    seen: set[int] = set()
    with forked(lambda: refill_for_ever(segment, 0)):
        for _ in range(LOADS):
            header = segment.load()
            assert_whole(header)
            seen.add(header.state)
        while len(seen) < len(REFILL_STATES):
            seen.add(segment.load().state)
    assert seen == REFILL_STATES


def test_a_block_refilled_without_being_freed_first_is_never_seen_half(segment: Segment) -> None:
    def overwrite_for_ever() -> None:
        generation = 0
        while True:
            generation += 1
            header_store(segment.writable, OFFSET, numbered(generation, BlockState.READY).pack())

    with forked(overwrite_for_ever):
        for _ in range(LOADS):
            assert_whole(segment.load())


def test_writers_killed_while_filling_leave_a_header_that_is_free_or_whole(segment: Segment) -> None:
    for _ in range(50):
        before = segment.load()
        with forked(lambda: refill_for_ever(segment, before.generation)) as child:  # noqa: B023 - runs at once
            assert header_wait(segment.read_only, OFFSET, before.change_seq, A_LONG_TIME_NS)
            child.kill()
        assert_whole(segment.load())
    header_store_state(segment.writable, OFFSET, BlockState.FAILED)
    assert segment.load().state == BlockState.FAILED
