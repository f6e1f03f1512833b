"""What a session's client sent, copied once into an input block, and checked there.

Called by `app.session_request`, for a large request in a thread. The client's memory is untrusted: nothing
looks at it but the copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from app.errors import InvalidRequest
from app.ingest import check_item_bytes, content_digest
from app.schema import MAX_REQ_ID_CHARACTERS, check_modality, check_req_id
from shm.errors import RegionCorrupt
from shm.layout import SessionDescriptor, page_align
from shm.messages import RequestMetadata
from shm.session import read_run

if TYPE_CHECKING:
    from app.config import ServeConfig
    from shm.arena import InputBlock

HEAD_MAX_BYTES: Final = 256 << 10  # of RequestMetadata and req_id
_decode_metadata = msgspec.msgpack.Decoder(RequestMetadata).decode


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What one request may be; as over HTTP."""

    request_timeout_ns: int
    input_bytes: int
    max_items: int
    max_item_bytes: int

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """A session's input region holds as much as a body may have, and the largest item in any case."""
        input_bytes = page_align(max(config.max_body_bytes, config.max_item_bytes + HEAD_MAX_BYTES))
        return cls(
            round(config.request_timeout_s * 1e9), input_bytes, config.max_items, config.max_item_bytes
        )


class Copied(NamedTuple):
    """A request's head as it stands in its own input block, checked; digest as `app.ingest` makes it."""

    modality: str
    req_id: str
    item_count: int
    digest: bytes


def copy_and_close(
    own_fd: int, descriptor: SessionDescriptor, block: InputBlock, limits: EncodeLimits
) -> Copied:
    """copy_request in a thread, which owns the descriptor."""
    try:
        return copy_request(own_fd, descriptor, block, limits)
    finally:
        os.close(own_fd)


def copy_request(
    input_fd: int, descriptor: SessionDescriptor, block: InputBlock, limits: EncodeLimits
) -> Copied:
    """The client's run into the block, and the head from there. Without the interpreter lock where it counts.

    InvalidRequest, InvalidItem, ItemTooLarge as over HTTP.
    """
    view = block.view
    try:
        read_run(input_fd, descriptor.offset, view)
    except (OSError, RegionCorrupt):
        raise InvalidRequest("the session's input region cannot be read") from None
    metadata = _metadata(view[: descriptor.metadata_bytes])
    req_id = _req_id(view[descriptor.metadata_bytes : descriptor.metadata_bytes + descriptor.req_id_bytes])
    check_modality(metadata.modality)
    _check_items(metadata, descriptor.metadata_bytes + descriptor.req_id_bytes, len(view), limits)
    items = (view[item.offset : item.offset + item.nbytes] for item in metadata.items)
    digest = content_digest(metadata.modality, items)
    return Copied(metadata.modality, req_id, len(metadata.items), digest)


def _metadata(head: memoryview) -> RequestMetadata:
    try:
        return _decode_metadata(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the request's head cannot be decoded") from None


def _req_id(raw: memoryview) -> str:
    """Empty if the client gave none."""
    if not raw:
        return ""
    if len(raw) > 4 * MAX_REQ_ID_CHARACTERS:
        raise InvalidRequest(f"req_id must have 1 to {MAX_REQ_ID_CHARACTERS} characters")
    try:
        req_id = str(raw, "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("req_id is not UTF-8") from None
    check_req_id(req_id)
    return req_id


def _check_items(metadata: RequestMetadata, head_bytes: int, nbytes: int, limits: EncodeLimits) -> None:
    """Plain files one behind the other: what overlaps would be more work than bytes."""
    if not metadata.items:
        raise InvalidRequest("mm_items is empty")
    if len(metadata.items) > limits.max_items:
        raise InvalidRequest(f"mm_items has more than {limits.max_items} items")
    position = head_bytes
    for index, item in enumerate(metadata.items):
        if item.offset < position or item.nbytes < 0 or item.nbytes > nbytes - item.offset:
            raise InvalidRequest(f"mm_items[{index}] is not inside its request")
        if item.kind != "media" or item.parts or item.options:
            raise InvalidRequest(f"mm_items[{index}] is of a kind that only HTTP takes")
        check_item_bytes(index, item.nbytes, limits.max_item_bytes)
        position = item.offset + item.nbytes
