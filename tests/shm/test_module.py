"""What module.c adds to the operations: single words, the parent-death signal, state of its own."""

import ctypes
import importlib.machinery
import importlib.util
import os
import signal

import pytest

from shm import _core, errors
from shm._core import set_parent_death_signal, word_load, word_store
from tests.shm.processes import forked

PR_GET_PDEATHSIG = 2


def test_a_word_is_stored_little_endian_and_loaded_back() -> None:
    region = bytearray(32)
    word_store(region, 8, 0x0102030405060708)
    assert region[8:16] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert word_load(memoryview(region).toreadonly(), 8) == 0x0102030405060708
    word_store(region, 24, 2**64 - 1)
    assert word_load(region, 24) == 2**64 - 1


@pytest.mark.parametrize("offset", [-8, 4, 25, 32, 2**63, -(2**70)])
def test_a_word_outside_the_region_or_unaligned_is_refused(offset: int) -> None:
    region = bytearray(32)
    with pytest.raises(ValueError, match=r"offset|inside|aligned"):
        word_load(region, offset)
    with pytest.raises(ValueError, match=r"offset|inside|aligned"):
        word_store(region, offset, 1)
    assert region == bytes(32)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_value_that_is_no_unsigned_word_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        word_store(bytearray(8), 0, value)
    with pytest.raises(BufferError):
        word_store(bytes(8), 0, 1)
    with pytest.raises(TypeError):
        word_store(bytearray(8), 0, "1")  # type: ignore[arg-type]


def test_the_parent_death_signal_is_set_for_this_process() -> None:
    def set_and_read_back() -> None:
        set_parent_death_signal(signal.SIGUSR2)
        held = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(held), 0, 0, 0)
        assert held.value == signal.SIGUSR2

    with forked(set_and_read_back) as child:
        assert child.wait() == 0
    with pytest.raises(OSError, match="Invalid argument"):
        set_parent_death_signal(9999)


def test_a_child_dies_with_the_parent_that_was_killed() -> None:
    read_end, write_end = os.pipe()

    def parent() -> None:
        def child() -> None:
            set_parent_death_signal(signal.SIGKILL)
            os.write(write_end, b"set")
            signal.pause()

        with forked(child):
            signal.pause()

    with forked(parent) as killed:
        assert os.read(read_end, 3) == b"set"
        os.close(write_end)
        killed.kill()
    assert os.read(read_end, 1) == b""  # the grandchild held the last write end
    os.close(read_end)


def test_a_second_copy_of_the_module_has_types_and_state_of_its_own() -> None:
    loader = importlib.machinery.ExtensionFileLoader("shm._core", _core.__file__)
    spec = importlib.util.spec_from_file_location("shm._core", _core.__file__, loader=loader)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    loader.exec_module(copy)
    assert copy.Producer is not _core.Producer
    memory = bytearray(2048)
    ring = copy.Consumer(memory, 256, memory, 0, 8)
    word_store(memory, 256, 99)
    with pytest.raises(errors.RegionCorrupt):
        ring.try_take()
