"""The stub tower: rows by formula, directives, refusals."""

import hashlib

import numpy as np
import pytest

from gpu_workers.errors import ItemError
from gpu_workers.families.base import MediaItem
from gpu_workers.families.stub import STUB_DIM, StubFamily, stub_rows
from shm.errors import ErrorCode

MASK = (1 << 64) - 1


def element(data: bytes, index: int) -> float:
    """The documented formula, without numpy."""
    seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    mixed ^= mixed >> 31
    return (mixed >> 40) / (1 << 23) - 1


def test_rows_follow_the_documented_formula() -> None:
    rows = stub_rows(b"stub rows=3")
    assert rows.shape == (3, STUB_DIM)
    assert rows.dtype == np.float32
    expected = [element(b"stub rows=3", index) for index in range(3 * STUB_DIM)]
    assert rows.ravel().tolist() == expected


def test_different_bytes_give_different_rows() -> None:
    first, second = stub_rows(b"one"), stub_rows(b"two")
    assert not (first == second).all(axis=1).any()


def test_the_size_is_known_from_the_directives() -> None:
    plan = StubFamily().measure(MediaItem("image", (memoryview(b"stub rows=5 fault=exit-on-take"),)))
    assert (plan.rows, plan.grids, plan.fault) == (5, [[1, 5, 1]], "exit-on-take")


@pytest.mark.parametrize("directive", [b"rows=0", b"rows=-1", b"rows=x", b"rows=99999999", b"forward_ms=1e3"])
def test_directives_that_make_no_sense_are_refused(directive: bytes) -> None:
    with pytest.raises(ItemError) as refusal:
        StubFamily().inspect(MediaItem("image", (memoryview(b"stub " + directive),)))
    assert refusal.value.code is ErrorCode.DECODE_FAILED
