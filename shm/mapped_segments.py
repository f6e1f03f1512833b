"""The segments that a session has mapped, read-only. `shm.client` has one MappedSegments for each session."""

from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from shm.errors import RegionCorrupt, SessionClosed
from shm.layout import RegionKind
from shm.messages import SegmentGrant
from shm.received_descriptors import ReceivedDescriptors
from shm.region import Region, attach_region, prefault
from shm.segment import SegmentReader


class MappedSegments:
    """By (place, epoch). boot_id: of the daemon whose segments these must be. The session's lock is held."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._mapped: dict[tuple[int, int], tuple[Region, SegmentReader]] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def has(self, place: int, epoch: int) -> bool:
        """Whether this one is mapped."""
        return (place, epoch) in self._mapped

    def reader(self, place: int, epoch: int) -> SegmentReader:
        """Of one that the daemon has passed; SessionClosed if it never did."""
        mapped = self._mapped.get((place, epoch))
        if mapped is None:
            raise SessionClosed("the daemon granted a lease in a segment that it never passed")
        return mapped[1]

    def add(self, grant: SegmentGrant, received: ReceivedDescriptors) -> None:
        """Map and prefault one whose descriptor came. RegionCorrupt if it is another one."""
        with ExitStack() as undo:
            region = undo.enter_context(attach_region(received.take(), RegionKind.SEGMENT, writable=False))
            found = SegmentGrant(region.header.place, region.header.epoch, region.size_bytes)
            if found != grant or region.header.boot_id.hex() != self._boot_id:
                raise RegionCorrupt("a segment that is not the one the daemon named")
            prefault(region, write=False)
            undo.pop_all()
        self._mapped[grant.index, grant.epoch] = (region, SegmentReader(region))

    def drop_abandoned(self, in_use: AbstractSet[tuple[int, int]]) -> None:
        """Unmap the segments of dead workers in which no lease exists any more."""
        for key, (region, reader) in list(self._mapped.items()):
            if reader.abandoned() and key not in in_use:
                del self._mapped[key]
                region.close()

    def close(self) -> None:
        """Unmap all."""
        while self._mapped:
            _, (region, _) = self._mapped.popitem()
            region.close()
