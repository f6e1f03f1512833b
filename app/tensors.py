"""Arrays of a processed item -> one safetensors file in the input block. Called by `app.ingest`.

The header is known before any array is decoded, because types and shapes say how long each one is.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from app.errors import InvalidItem
from app.items import NamedArray

_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
_LENGTH: Final = struct.Struct("<Q")


class Loadable(Protocol):
    """One array's bytes, not decoded yet."""

    @property
    def bound_bytes(self) -> int:
        """Upper bound of what load_into writes."""

    def load_into(self, target: memoryview) -> int:
        """Write at most bound_bytes into target; bytes written."""


@dataclass(frozen=True, slots=True)
class TensorsLayout:
    """The file's beginning, and how many bytes each array must have, in order."""

    head: bytes
    sizes: list[int]
    names: list[str]


def tensors_layout(arrays: Sequence[NamedArray], index: int) -> TensorsLayout:
    """Of these arrays of item number `index`. InvalidItem for one whose text cannot be that long."""
    header = {}
    sizes = []
    position = 0
    for array in arrays:
        nbytes = math.prod(array.shape) * _ITEM_BYTES[array.dtype]
        if nbytes > len(array.source.text):
            raise _wrong_length(index, array.name, nbytes)
        header[array.name] = {
            "dtype": array.dtype,
            "shape": array.shape,
            "data_offsets": (position, position + nbytes),
        }
        sizes.append(nbytes)
        position += nbytes
    encoded = msgspec.json.encode(header)
    return TensorsLayout(_LENGTH.pack(len(encoded)) + encoded, sizes, [array.name for array in arrays])


@dataclass(frozen=True, slots=True)
class TensorsContent:
    """An `app.ingest.Content`: the whole file."""

    layout: TensorsLayout
    arrays: Sequence[Loadable]
    index: int

    @property
    def bound_bytes(self) -> int:
        """With the slack that each array's text may need while it is decoded."""
        return len(self.layout.head) + sum(array.bound_bytes for array in self.arrays)

    def load_into(self, target: memoryview) -> int:
        """Decode each array behind the one before it. InvalidItem for one of another length than it says."""
        position = len(self.layout.head)
        target[:position] = self.layout.head
        for array, nbytes, name in zip(self.arrays, self.layout.sizes, self.layout.names, strict=True):
            if array.load_into(target[position : position + array.bound_bytes]) != nbytes:
                raise _wrong_length(self.index, name, nbytes)
            position += nbytes
        return position


def _wrong_length(index: int, name: str, nbytes: int) -> InvalidItem:
    return InvalidItem(f"mm_items[{index}].processed.{name}.data must be {nbytes} bytes", item_index=index)
