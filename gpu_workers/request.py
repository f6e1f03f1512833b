"""What a request's bytes in the arena are: the metadata at their head, and the items' files behind it.

Used by intake.py and, in a tensor-parallel group, by the ranks that prepare items of rank 0's requests.
Everything is checked against the block, because shared memory is input.
"""

import msgspec

from gpu_workers.errors import ItemError
from gpu_workers.families.base import MediaItem
from shm.errors import ErrorCode
from shm.messages import ItemSource, Part, RequestMetadata


class MalformedRequest(Exception):
    """The control plane's words do not fit the block; for the log."""


def read_metadata(block: memoryview, metadata_bytes: int) -> RequestMetadata:
    """The head of the input block. MalformedRequest if it is not what the descriptor says."""
    try:
        return msgspec.msgpack.decode(bytes(block[:metadata_bytes]), type=RequestMetadata)
    except msgspec.DecodeError:
        raise MalformedRequest("the input block has no readable metadata") from None


def media_item(modality: str, source: ItemSource, block: memoryview) -> MediaItem:
    """The item's files as views of the block. ItemError if one is empty, MalformedRequest if outside."""
    parts = source.parts if source.kind == "frames" else [Part(source.offset, source.nbytes)]
    files = tuple(_view(part, block) for part in parts)
    if not files or any(len(file) == 0 for file in files):
        raise ItemError(ErrorCode.EMPTY_ITEM)
    return MediaItem(modality, files, source.kind, source.options)


def _view(part: Part, block: memoryview) -> memoryview:
    if not (0 <= part.offset <= len(block) and 0 <= part.nbytes <= len(block) - part.offset):
        raise MalformedRequest("an item lies outside its input block")
    return block[part.offset : part.offset + part.nbytes]
