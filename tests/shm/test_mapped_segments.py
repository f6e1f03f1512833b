"""shm.mapped_segments: only what the daemon named is mapped, and what it gave up is let go."""

import os
from collections.abc import Iterator

import pytest

from shm.errors import RegionCorrupt, SessionClosed
from shm.mapped_segments import MappedSegments
from shm.messages import SegmentGrant
from shm.received_descriptors import ReceivedDescriptors
from shm.region import Backing, Region
from shm.segment import SegmentRecovery, create_segment

BOOT_ID = bytes(range(16))
SEGMENT_BYTES = 1 << 20


@pytest.fixture
def region() -> Iterator[Region]:
    backing = Backing.MEMFD
    with create_segment(SEGMENT_BYTES, boot_id=BOOT_ID, place=2, epoch=3, backing=backing) as region:
        yield region


def add(segments: MappedSegments, region: Region, epoch: int = 3) -> None:
    with ReceivedDescriptors([os.dup(region.fd)]) as received:
        segments.add(SegmentGrant(2, epoch, SEGMENT_BYTES), received)


def test_a_segment_that_was_passed_can_be_read(region: Region) -> None:
    segments = MappedSegments(BOOT_ID.hex())
    add(segments, region)
    assert segments.has(2, 3)
    assert segments.reader(2, 3).header(0).generation == 0
    segments.close()
    assert len(segments) == 0


def test_a_segment_that_is_not_the_one_named_is_refused(region: Region) -> None:
    segments = MappedSegments(BOOT_ID.hex())
    with pytest.raises(RegionCorrupt):
        add(segments, region, epoch=4)
    with pytest.raises(RegionCorrupt):
        add(MappedSegments(bytes(16).hex()), region)
    with pytest.raises(SessionClosed):
        segments.reader(2, 4)
    assert len(segments) == 0


def test_an_abandoned_segment_is_unmapped_once_no_lease_is_in_it(region: Region) -> None:
    segments = MappedSegments(BOOT_ID.hex())
    add(segments, region)
    segments.drop_abandoned(set())
    assert segments.has(2, 3), "it is not abandoned"
    SegmentRecovery(region).abandon()
    segments.drop_abandoned({(2, 3)})
    assert segments.has(2, 3), "somebody reads in it"
    segments.drop_abandoned(set())
    assert not segments.has(2, 3)
