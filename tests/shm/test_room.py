"""shm.room: the numbers are those that the kernel gives."""

import os
from pathlib import Path

from shm.room import SHM_DIRECTORY, cgroup_room, memory_room, posix_room


def test_memory_room_is_no_more_than_the_machine_has() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = memory_room()
    assert 0 < room.free_bytes <= pages
    assert room.limit in ("MemAvailable", "memory.max of the control group")


def test_posix_room_is_no_more_than_the_filesystem_has() -> None:
    filesystem = os.statvfs(SHM_DIRECTORY)
    room = posix_room()
    assert 0 < room.free_bytes <= filesystem.f_blocks * filesystem.f_frsize
    assert room.limit == "free space in /dev/shm" or room.limit == memory_room().limit


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 500000\nshmem 200000\n")
    room = cgroup_room(tmp_path)
    assert room is not None
    assert room.free_bytes == 1000000 - 600000 + 300000  # file cache goes, shared memory stays


def test_a_control_group_without_a_limit_counts_for_nothing(tmp_path: Path) -> None:
    assert cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("file 0\n")
    assert cgroup_room(tmp_path) is None
