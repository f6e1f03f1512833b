"""shm.encode_request: how an encode lies in the input region, and that its head always has room."""

import os

import msgspec
import pytest

from shm.encode_request import pack_request
from shm.messages import RequestMetadata


def test_a_request_is_laid_out_as_an_input_block() -> None:
    items = [os.urandom(number) for number in (1, 63, 64, 5000)]
    packed = pack_request([*items[:2], bytearray(items[2]), memoryview(items[3])], "video", "id é")
    run = b"".join(packed.pieces)
    assert len(run) == packed.nbytes
    metadata = msgspec.msgpack.decode(run[: packed.metadata_bytes], type=RequestMetadata)
    req_id = run[packed.metadata_bytes :][: packed.req_id_bytes].decode()
    assert (metadata.modality, req_id) == ("video", "id é")
    assert [run[source.offset :][: source.nbytes] for source in metadata.items] == items
    assert all(source.offset % 64 == 0 for source in metadata.items)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 1024])
@pytest.mark.parametrize("req_id", ["", "x" * 512])
def test_however_many_items_the_head_ends_before_the_first(count: int, req_id: str) -> None:
    items = [bytes(70_000)] * count  # offsets that take five bytes
    packed = pack_request(items, "image", req_id)
    head_bytes = packed.metadata_bytes + packed.req_id_bytes
    metadata = msgspec.msgpack.decode(bytes(packed.pieces[0])[: packed.metadata_bytes], type=RequestMetadata)
    assert len(packed.pieces[0]) >= head_bytes
    assert all(source.offset >= head_bytes for source in metadata.items)
    assert sum(map(len, packed.pieces)) == packed.nbytes
