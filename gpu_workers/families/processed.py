"""Already processed items: a safetensors file with what the model's processor gives, read with suspicion.

Nothing is taken on trust: names, types, shapes, byte counts and the integers themselves are checked before
the model sees a tensor. Every error is an ItemError that names the tensor, or BAD_TENSORS for a broken file.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import msgspec
import torch

from gpu_workers.errors import ItemError
from shm.errors import ErrorCode, TensorFault

Sizes: TypeAlias = Sequence[int | None]  # of each dimension; None: any

LARGEST_INTEGER: Final = 1 << 20
LARGEST_COUNT: Final = 4096  # grids, or sizes, of one item
_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 1 << 16
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS: Final = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_DTYPES: Final = {**_FLOATS, **_INTEGERS}
_METADATA: Final = "__metadata__"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """The tensors of a safetensors file. Every error is an ItemError."""

    def __init__(self, data: memoryview) -> None:
        """Reads and checks the header; no tensor yet."""
        self._entries, self._content = _read_header(data)

    def __contains__(self, name: str) -> bool:
        """Whether it has a tensor of this name."""
        return name in self._entries

    def float_sizes(self, name: str, wanted: Sizes) -> list[int]:
        """Shape of a float tensor, without reading it."""
        return self._entry(name, _FLOATS, wanted).shape

    def floats(self, name: str, wanted: Sizes) -> torch.Tensor:
        """A copy of a float tensor, all of it finite."""
        tensor = self._tensor(self._entry(name, _FLOATS, wanted))
        if not bool(torch.isfinite(tensor).all()):
            raise _fault(ErrorCode.TENSOR_NOT_FINITE, name)
        return tensor

    def integers(
        self, name: str, wanted: Sizes, *, least: int = 1, most: int = LARGEST_INTEGER
    ) -> torch.Tensor:
        """A copy of an integer or boolean tensor, int64, of numbers from least to most."""
        tensor = self._tensor(self._entry(name, _INTEGERS, wanted)).to(torch.int64)
        lowest, highest = (int(number) for number in tensor.aminmax())
        if lowest < least or highest > most:
            raise out_of_range(name, lowest if lowest < least else highest, most)
        return tensor

    def grids(self, name: str) -> list[list[int]]:
        """An integer tensor (n, 3) of numbers from 1 to 2**20."""
        grids: list[list[int]] = self.counted(name, (None, 3)).tolist()
        return grids

    def counted(self, name: str, wanted: Sizes) -> torch.Tensor:
        """As integers, of a tensor that code looks at number by number: not more than 4096 of them."""
        found = self._entry(name, _INTEGERS, wanted).shape[0]
        if found > LARGEST_COUNT:
            raise wrong_size(name, 0, found, LARGEST_COUNT)
        return self.integers(name, wanted)

    def _entry(self, name: str, dtypes: dict[str, torch.dtype], wanted: Sizes) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise _fault(ErrorCode.TENSOR_MISSING, name)
        if entry.dtype not in dtypes:
            raise _fault(ErrorCode.TENSOR_TYPE, name, limit=int(dtypes is _INTEGERS))
        if len(entry.shape) != len(wanted):
            raise _fault(ErrorCode.TENSOR_DIMENSIONS, name, found=len(entry.shape), limit=len(wanted))
        for axis, (size, limit) in enumerate(zip(entry.shape, wanted, strict=True)):
            if limit is not None and size != limit:
                raise wrong_size(name, axis, size, limit)
        return entry

    def _tensor(self, entry: _Entry) -> torch.Tensor:
        start, end = entry.data_offsets
        content = bytearray(self._content[start:end])  # a copy: the arena may be given back, and is read-only
        if entry.dtype == "BOOL":
            return torch.frombuffer(content, dtype=torch.uint8).ne(0).reshape(entry.shape)
        return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


class ProcessedLayout:
    """What the tensors of one processor look like: their types, and which of their sizes never change."""

    def __init__(self, samples: Sequence[Mapping[str, torch.Tensor]], *, first_is_free: bool) -> None:
        """samples: outputs for items of different sizes; what is equal in all of them is taken for fixed.
        first_is_free: an item may be several of what a sample is one of."""
        self._like = samples[0]
        self._sizes = {
            name: _sizes_of([sample[name] for sample in samples], first_is_free=first_is_free)
            for name in self._like
        }

    def outline(self, data: memoryview) -> dict[str, torch.Tensor]:
        """The processor's outputs with the pixels on the meta device. ItemError."""
        file = TensorFile(data)
        return {
            name: torch.empty(file.float_sizes(name, self._sizes[name]), device="meta")
            if like.is_floating_point()
            else self._integers(file, name, like)
            for name, like in self._like.items()
        }

    def outputs(self, data: memoryview) -> dict[str, torch.Tensor]:
        """The processor's outputs. ItemError."""
        file = TensorFile(data)
        return {
            name: file.floats(name, self._sizes[name])
            if like.is_floating_point()
            else self._integers(file, name, like)
            for name, like in self._like.items()
        }

    def _integers(self, file: TensorFile, name: str, like: torch.Tensor) -> torch.Tensor:
        if like.dtype is torch.bool or name.endswith("mask"):
            return file.integers(name, self._sizes[name], least=0, most=1).to(like.dtype)
        return file.counted(name, self._sizes[name]).to(like.dtype)


def tensors_among(outputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of a processor's outputs that have these names."""
    return {name: torch.as_tensor(outputs[name]) for name in names if name in outputs}


def wrong_size(name: str, axis: int, found: int, limit: int) -> ItemError:
    """For a tensor that has `found` elements along an axis where it must have `limit`."""
    return _fault(ErrorCode.TENSOR_SIZE, name, axis, found, limit)


def out_of_range(name: str, found: int, limit: int) -> ItemError:
    """For an integer that the model cannot take."""
    return _fault(ErrorCode.TENSOR_VALUE, name, found=found, limit=limit)


def no_multiple(name: str, axis: int, found: int, limit: int) -> ItemError:
    """For an integer, or a size, that is no multiple of `limit`."""
    return _fault(ErrorCode.TENSOR_MULTIPLE, name, axis, found, limit)


def unfit() -> ItemError:
    """For tensors that are right one by one and do not belong together."""
    return ItemError(ErrorCode.BAD_TENSORS)


@contextmanager
def refusals_are_unfit() -> Iterator[None]:
    """Around what a model's own code makes of tensors from outside: whatever it raises is their fault."""
    try:
        yield
    except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError, RuntimeError):
        raise unfit() from None


def _fault(code: ErrorCode, name: str, axis: int = 0, found: int = 0, limit: int = 0) -> ItemError:
    return ItemError(code, TensorFault(name, axis, found).pack(), limit)


def _sizes_of(tensors: Sequence[torch.Tensor], *, first_is_free: bool) -> list[int | None]:
    sizes = [
        lengths[0] if len(set(lengths)) == 1 else None
        for lengths in zip(*(one.shape for one in tensors), strict=True)
    ]
    return [None, *sizes[1:]] if first_is_free and sizes else sizes


def _read_header(data: memoryview) -> tuple[dict[str, _Entry], memoryview]:
    if len(data) < _LENGTH.size:
        raise unfit()
    (header_bytes,) = _LENGTH.unpack_from(data)
    if header_bytes > min(_MAX_HEADER_BYTES, len(data) - _LENGTH.size):
        raise unfit()
    content = data[_LENGTH.size + header_bytes :]
    try:
        header = msgspec.json.decode(
            bytes(data[_LENGTH.size : _LENGTH.size + header_bytes]), type=dict[str, msgspec.Raw]
        )
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items() if name != _METADATA
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise unfit() from None
    for entry in entries.values():
        _check_entry(entry, len(content))
    return entries, content


def _check_entry(entry: _Entry, content_bytes: int) -> None:
    start, end = entry.data_offsets
    if entry.dtype not in _DTYPES or not 0 <= start < end <= content_bytes:
        raise unfit()
    if any(not 1 <= size <= content_bytes for size in entry.shape) or len(entry.shape) > 8:
        raise unfit()
    if math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize != end - start:
        raise unfit()
