"""shm.input_pages: the client's runs, written once, read by control without a mapping."""

import os
from collections.abc import Iterator

import pytest

from shm.input_pages import KEPT_BYTES, InputPages
from shm.layout import PAGE_BYTES, RegionKind
from shm.region import attach_region
from shm.session import SessionRegions, create_session_regions, read_run

INPUT_BYTES = KEPT_BYTES + (4 << 20)


@pytest.fixture
def regions() -> Iterator[SessionRegions]:
    with create_session_regions(bytes(16), 1, INPUT_BYTES) as regions:
        yield regions


@pytest.fixture
def pages(regions: SessionRegions) -> Iterator[InputPages]:
    with attach_region(os.dup(regions.client.fd), RegionKind.SESSION_CLIENT, writable=True) as client:
        yield InputPages(client, INPUT_BYTES)


def allocated_bytes(regions: SessionRegions) -> int:
    return os.fstat(regions.client.fd).st_blocks * 512


def read(regions: SessionRegions, offset: int, nbytes: int) -> bytes:
    target = bytearray(nbytes)
    read_run(regions.input_fd, offset, memoryview(target))
    return bytes(target)


def test_what_the_client_writes_is_what_control_copies(regions: SessionRegions, pages: InputPages) -> None:
    pieces = [os.urandom(100), memoryview(os.urandom(70_000)), bytearray(b"end")]
    nbytes = sum(map(len, pieces))
    assert pages.allocate(1) == 0
    offset = pages.allocate(nbytes)
    assert offset == PAGE_BYTES
    pages.write(offset, list(pieces))
    assert read(regions, offset, nbytes) == b"".join(pieces)


def test_more_pieces_than_one_system_call_takes_are_written_all(
    regions: SessionRegions, pages: InputPages
) -> None:
    pieces = [bytes([number % 256]) * (1 + number % 3) for number in range(2500)]
    pages.write(0, list(pieces))
    expected = b"".join(pieces)
    assert read(regions, 0, len(expected)) == expected


def test_pages_come_as_they_are_written_and_reading_a_hole_costs_none(
    regions: SessionRegions, pages: InputPages
) -> None:
    before = allocated_bytes(regions)
    assert before < 1 << 20
    assert read(regions, 0, 1 << 20) == bytes(1 << 20)
    assert allocated_bytes(regions) == before
    pages.write(0, [b"x" * PAGE_BYTES])
    assert allocated_bytes(regions) > before


def test_a_full_region_has_no_room_until_a_run_is_free(pages: InputPages) -> None:
    whole = pages.allocate(INPUT_BYTES)
    assert whole == 0
    assert pages.allocate(1) is None
    pages.free(0, INPUT_BYTES)
    assert pages.allocate(INPUT_BYTES) == 0


def test_what_a_large_request_used_goes_back_to_the_kernel(
    regions: SessionRegions, pages: InputPages
) -> None:
    offset = pages.allocate(INPUT_BYTES)
    assert offset is not None
    pages.write(offset, [bytes(INPUT_BYTES)])
    full = allocated_bytes(regions)
    pages.free(offset, INPUT_BYTES)
    assert full - allocated_bytes(regions) >= INPUT_BYTES - KEPT_BYTES
