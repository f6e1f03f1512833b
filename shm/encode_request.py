"""One encode as its bytes lie in a session's input region: `shm.client` packs, `shm.encode_ring` sends it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from shm.messages import ItemSource, RequestMetadata

Media = bytes | bytearray | memoryview
_ALIGNMENT_BYTES: Final = 64
_PADDING: Final = bytes(_ALIGNMENT_BYTES)
# RequestMetadata as msgpack, at most: its own array, the list and the text's length; and for each item an
# array of five with two integers, "media", and two empty ones.
_METADATA_BYTES: Final = 16
_SOURCE_BYTES: Final = 32
_encode_metadata = msgspec.msgpack.Encoder().encode


class Request(NamedTuple):
    """[metadata][req_id][items, each aligned]: the pieces one behind the other are nbytes."""

    pieces: list[Media]
    nbytes: int
    metadata_bytes: int
    req_id_bytes: int


def pack_request(items: Sequence[Media], modality: str, req_id: str) -> Request:
    """Lay the items out; nothing is copied. req_id: empty for none."""
    text_bytes = len(modality.encode())
    id_bytes = req_id.encode()
    # Sources count from the run's start, which the metadata's own length moves: the largest it can have.
    room = _METADATA_BYTES + text_bytes + _SOURCE_BYTES * len(items) + len(id_bytes)
    position = start = -(-room // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    sources = []
    pieces: list[Media] = [b""]
    for item in items:
        flat = item if isinstance(item, bytes) else memoryview(item).cast("B")
        sources.append(ItemSource(position, len(flat)))
        padding = -len(flat) % _ALIGNMENT_BYTES
        pieces += [flat, _PADDING[:padding]] if padding else [flat]
        position += len(flat) + padding
    head = _encode_metadata(RequestMetadata(modality, sources))
    pieces[0] = (head + id_bytes).ljust(start, b"\0")
    return Request(pieces, position, len(head), len(id_bytes))
