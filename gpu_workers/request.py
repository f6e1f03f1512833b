"""What a request's bytes in the arena are: the metadata at their head, and the items' files behind it.

Used by intake.py and, in a tensor-parallel group, by the ranks that prepare items of rank 0's requests.
Everything is checked against the block, because shared memory is input.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from gpu_workers.errors import ItemError
from gpu_workers.families.base import MediaItem
from shm.errors import ErrorCode
from shm.messages import PARTED_KINDS, ItemSource, Part, RequestMetadata

_DECODER: Final = msgspec.msgpack.Decoder(RequestMetadata)


class MalformedRequest(Exception):
    """The control plane's words do not fit the block; for the log."""


def read_metadata(block: memoryview, metadata_bytes: int) -> RequestMetadata:
    """The head of the input block. MalformedRequest if it is not what the descriptor says."""
    try:
        return _DECODER.decode(bytes(block[:metadata_bytes]))
    except msgspec.DecodeError:
        raise MalformedRequest("the input block has no readable metadata") from None


def media_item(modality: str, source: ItemSource, block: memoryview) -> MediaItem:
    """The item's files as views of the block. ItemError if one is empty, MalformedRequest if outside."""
    parts: Sequence[Part | ItemSource] = source.parts if source.kind in PARTED_KINDS else [source]
    if not parts:
        raise ItemError(ErrorCode.EMPTY_ITEM)
    files = tuple([_view(part, block) for part in parts])
    return MediaItem(modality, files, source.kind, source.options)


def _view(part: Part | ItemSource, block: memoryview) -> memoryview:
    offset, nbytes = part.offset, part.nbytes
    if not (0 <= offset <= len(block) and 0 <= nbytes <= len(block) - offset):
        raise MalformedRequest("an item lies outside its input block")
    if nbytes == 0:
        raise ItemError(ErrorCode.EMPTY_ITEM)
    return block[offset : offset + nbytes]
