"""The test tower: no model, no torch. Rows are a documented function of the item's bytes.

An item is any bytes. One that begins with b"stub " is read as blank-separated directives after it:

    rows=N         how many rows (default 16)
    forward_ms=N   how long its forward takes
    measure=1      its size cannot be told from its header
    fault=NAME     a faults.FaultPoint to strike this item's request (or its worker)

The whole item, directives included, goes into the digest: items that differ at all differ in every row.
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gpu_workers.errors import ItemError
from gpu_workers.families.base import FamilyInfo, ItemPlan, MediaItem, Prepared, Rows
from shm.errors import ErrorCode
from shm.layout import Dtype

STUB_DIM: Final = 256
DEFAULT_ROWS: Final = 16
_MAX_ROWS: Final = 1 << 20
_MAX_FORWARD_MS: Final = 600_000
_PREFIX: Final = b"stub "
_MAX_DIRECTIVES_BYTES: Final = 4096
# splitmix64, and what makes a float in [-1, 1) of its upper 24 bits
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT: Final = np.uint64(31)
_SPARE_BITS: Final = np.uint64(40)
_HALF_RANGE: Final = np.float32(1 << 23)
_ONE: Final = np.float32(1)


def stub_rows(data: bytes) -> npt.NDArray[np.float32]:
    """The rows (rows, STUB_DIM) that the stub tower gives for an item with these bytes.

    Element i (row-major) is splitmix64(seed + (i + 1) * 0x9E3779B97F4A7C15), seed being the first 8 bytes
    (little-endian) of sha256(data); its upper 24 bits, divided by 2**23, minus 1, are a float32 in [-1, 1).
    """
    [rows] = _rows_of([data], [_directives(memoryview(data)).rows])
    return rows


def _rows_of(items: list[bytes], row_counts: list[int]) -> list[npt.NDArray[np.float32]]:
    """stub_rows of every item; those of items of one size are computed together."""
    rows: dict[int, npt.NDArray[np.float32]] = {}
    for row_count in set(row_counts):
        places = [place for place, count in enumerate(row_counts) if count == row_count]
        rows.update(zip(places, _equal_rows([items[place] for place in places], row_count), strict=True))
    return [rows[place] for place in range(len(items))]


def _equal_rows(items: list[bytes], row_count: int) -> npt.NDArray[np.float32]:
    """Of items that all have row_count rows: (items, row_count, STUB_DIM)."""
    seeds = np.frombuffer(b"".join([hashlib.sha256(item).digest()[:8] for item in items]), dtype="<u8")
    mixed = np.arange(1, row_count * STUB_DIM + 1, dtype=np.uint64) * _GAMMA + seeds[:, np.newaxis]
    for shift, factor in _MIX:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _LAST_SHIFT
    elements: npt.NDArray[np.float32] = (mixed >> _SPARE_BITS).astype(np.float32)
    elements /= _HALF_RANGE
    elements -= _ONE
    return elements.reshape(len(items), row_count, STUB_DIM)


@dataclass(frozen=True, slots=True)
class _Directives:
    rows: int = DEFAULT_ROWS
    forward_ms: int = 0
    measure: bool = False
    fault: str = ""


_NO_DIRECTIVES: Final = _Directives()


def _directives(data: memoryview) -> _Directives:
    """What the item asks for. ItemError for a directive that makes no sense."""
    if bytes(data[: len(_PREFIX)]) != _PREFIX:
        return _NO_DIRECTIVES
    words = bytes(data[len(_PREFIX) : _MAX_DIRECTIVES_BYTES]).decode("ascii", errors="replace").split()
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    return _Directives(
        rows=_number(pairs.get("rows"), DEFAULT_ROWS, 1, _MAX_ROWS),
        forward_ms=_number(pairs.get("forward_ms"), 0, 0, _MAX_FORWARD_MS),
        measure=_number(pairs.get("measure"), 0, 0, 1) == 1,
        fault=pairs.get("fault", ""),
    )


def _number(text: str | None, default: int, minimum: int, maximum: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not minimum <= int(text) <= maximum:
        raise ItemError(ErrorCode.DECODE_FAILED)
    return int(text)


class StubFamily:
    """Takes any modality that the control plane knows."""

    def info(self) -> FamilyInfo:
        """256 columns of float32."""
        return FamilyInfo("stub", ("image", "video", "audio"), STUB_DIM, Dtype.FLOAT32, 0)

    def samples(self) -> list[MediaItem]:
        """One row."""
        return [MediaItem("image", (memoryview(b"stub rows=1"),))]

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the directives alone."""
        asked = _directives(item.data)
        return None if asked.measure else _plan(asked)

    def measure(self, item: MediaItem) -> ItemPlan:
        """From the directives too."""
        return _plan(_directives(item.data))

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """A copy of the bytes: the arena is not read during the forward."""
        return Prepared(item.modality, plan, {"data": bytes(item.data)})

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """stub_rows of each item, after as long as the slowest of them asks for."""
        items = [bytes(prepared.features["data"]) for prepared in batch]
        asked = [_asked_in(prepared.plan) for prepared in batch]
        forward_ms = max(its.forward_ms for its in asked)
        if forward_ms:
            time.sleep(forward_ms / 1000)
        return list(_rows_of(items, [its.rows for its in asked]))


def _asked_in(plan: ItemPlan) -> _Directives:
    assert isinstance(plan.media_plan, _Directives), "inspect or measure made the plan"
    return plan.media_plan


def _plan(asked: _Directives) -> ItemPlan:
    return ItemPlan(
        asked.rows,
        [[1, asked.rows, 1]],
        1,
        1,
        asked.rows,
        asked.fault,
        media_plan=asked,
        prepares_at_once=True,
    )
