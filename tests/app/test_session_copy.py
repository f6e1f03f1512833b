"""app.session_copy: what a client wrote is copied once, and only the copy is believed."""

from collections.abc import Iterator

import msgspec
import pytest

from app.errors import InvalidItem, InvalidRequest, ItemTooLarge, RequestError
from app.ingest import content_digest
from app.session_copy import Copied, EncodeLimits, copy_request
from shm.encode_request import Request, pack_request
from shm.layout import SessionDescriptor, SessionKind
from shm.messages import ItemSource, RequestMetadata
from shm.session import SessionRegions, create_session_regions, write_run
from tests.app.support import small_arena

INPUT_BYTES = 1 << 20
LIMITS = EncodeLimits(10**9, INPUT_BYTES, max_items=3, max_item_bytes=1000)


@pytest.fixture
def regions() -> Iterator[SessionRegions]:
    with create_session_regions(bytes(16), 1, INPUT_BYTES) as regions:
        yield regions


def copy(regions: SessionRegions, request: Request) -> Copied:
    """What comes of a request that lies at 4096."""
    write_run(regions.input_fd, 4096, request.pieces)
    descriptor = SessionDescriptor(
        SessionKind.ENCODE,
        offset=4096,
        nbytes=request.nbytes,
        metadata_bytes=request.metadata_bytes,
        req_id_bytes=request.req_id_bytes,
    )
    with small_arena() as arena:
        block = arena.allocate(request.nbytes)
        assert block is not None
        with block:
            return copy_request(regions.input_fd, descriptor, block, LIMITS)


def sources(*items: ItemSource) -> Request:
    """A request whose metadata says this of a run of 256 bytes."""
    head = msgspec.msgpack.encode(RequestMetadata("image", list(items)))
    return Request([head.ljust(256, b"x")], 256, len(head), 0)


def test_the_digest_is_that_of_the_same_items_over_http(regions: SessionRegions) -> None:
    copied = copy(regions, pack_request([b"one", b"two"], "video", "name"))
    digest = content_digest("video", map(memoryview, (b"one", b"two")))
    assert copied == Copied("video", "name", 2, digest)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pack_request([], "image", ""), InvalidRequest),
        (pack_request([b"x"] * 4, "image", ""), InvalidRequest),
        (pack_request([b"x"], "smell", ""), InvalidRequest),
        (pack_request([b"x"], "image", "a\nb"), InvalidRequest),
        (pack_request([b"x"], "image", "n" * 513), InvalidRequest),
        (pack_request([b""], "image", ""), InvalidItem),
        (pack_request([bytes(1001)], "image", ""), ItemTooLarge),
        (Request([b"\xc1" + bytes(63)], 64, 8, 0), InvalidRequest),
        (sources(ItemSource(250, 7)), InvalidRequest),
        (sources(ItemSource(0, 8)), InvalidRequest),
        (sources(ItemSource(128, 64), ItemSource(160, 8)), InvalidRequest),
        (sources(ItemSource(128, -1)), InvalidRequest),
    ],
    ids=[
        "no items", "too many items", "modality", "control character", "long req_id", "empty item",
        "large item", "no msgpack", "leaves the run", "in the head", "overlap", "negative",
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(
    regions: SessionRegions, request_: Request, error: type[RequestError]
) -> None:
    with pytest.raises(error):
        copy(regions, request_)
