"""Already processed items: a safetensors file with what the model's processor gives, read with suspicion.

Nothing is taken on trust: names, types, shapes and byte counts are checked before any tensor is made.
"""

import math
import struct
from typing import Final

import msgspec
import torch

from gpu_workers.errors import ItemError
from shm.errors import ErrorCode

_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 1 << 16
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS: Final = {"I64": torch.int64, "I32": torch.int32}
_DTYPES: Final = {**_FLOATS, **_INTEGERS}
_METADATA: Final = "__metadata__"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """The tensors of a safetensors file. Every error is ItemError(BAD_TENSORS)."""

    def __init__(self, data: memoryview) -> None:
        """Reads and checks the header; no tensor yet."""
        self._entries, self._content = _read_header(data)

    def floats(self, name: str, columns: int) -> torch.Tensor:
        """A copy of a float tensor (rows, columns), all of it finite."""
        entry = self._entry(name, _FLOATS, dimensions=2)
        if entry.shape[1] != columns:
            raise _bad()
        tensor = self._tensor(entry)
        if not bool(torch.isfinite(tensor).all()):
            raise _bad()
        return tensor

    def rows(self, name: str) -> int:
        """First size of a tensor, without reading it."""
        return self._entry(name, _DTYPES, dimensions=2).shape[0]

    def grids(self, name: str) -> list[list[int]]:
        """An integer tensor (n, 3) of numbers from 1 to 2**20."""
        entry = self._entry(name, _INTEGERS, dimensions=2)
        if entry.shape[0] < 1 or entry.shape[1] != 3:
            raise _bad()
        grids: list[list[int]] = self._tensor(entry).tolist()
        if any(not 1 <= size <= 1 << 20 for grid in grids for size in grid):
            raise _bad()
        return grids

    def _entry(self, name: str, dtypes: dict[str, torch.dtype], dimensions: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.dtype not in dtypes or len(entry.shape) != dimensions:
            raise _bad()
        return entry

    def _tensor(self, entry: _Entry) -> torch.Tensor:
        start, end = entry.data_offsets
        content = bytearray(self._content[start:end])  # a copy: the arena may be given back, and is read-only
        return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


def _read_header(data: memoryview) -> tuple[dict[str, _Entry], memoryview]:
    if len(data) < _LENGTH.size:
        raise _bad()
    (header_bytes,) = _LENGTH.unpack_from(data)
    if header_bytes > min(_MAX_HEADER_BYTES, len(data) - _LENGTH.size):
        raise _bad()
    content = data[_LENGTH.size + header_bytes :]
    try:
        header = msgspec.json.decode(
            bytes(data[_LENGTH.size : _LENGTH.size + header_bytes]), type=dict[str, msgspec.Raw]
        )
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items() if name != _METADATA
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _bad() from None
    for entry in entries.values():
        _check_entry(entry, len(content))
    return entries, content


def _check_entry(entry: _Entry, content_bytes: int) -> None:
    start, end = entry.data_offsets
    if entry.dtype not in _DTYPES or not 0 <= start < end <= content_bytes:
        raise _bad()
    if any(not 1 <= size <= content_bytes for size in entry.shape) or len(entry.shape) > 8:
        raise _bad()
    if math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize != end - start:
        raise _bad()


def _bad() -> ItemError:
    return ItemError(ErrorCode.BAD_TENSORS)
