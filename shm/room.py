"""How much shared memory this process could still have, and which limit says so.

Called by region before anything is reserved (a reservation that cannot be met would otherwise end in the
kernel's out-of-memory killer) and by `encoderd doctor`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

SHM_DIRECTORY: Final = Path("/dev/shm")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """Bytes that can still be had. limit: the name of what ends there, for messages."""

    free_bytes: int
    limit: str


def posix_room() -> Room:
    """Room for POSIX shared memory: what /dev/shm has left, or memory if that is less.

    OSError where /dev/shm does not exist.
    """
    filesystem = os.statvfs(SHM_DIRECTORY)
    return min(Room(filesystem.f_bavail * filesystem.f_frsize, "free space in /dev/shm"), memory_room())


def memory_room() -> Room:
    """Room for a memfd: the machine's available memory, or the control group's if that is less."""
    return min([_machine_room(), *_cgroup_rooms()])


def _machine_room() -> Room:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return Room(int(rest.split()[0]) * 1024, "MemAvailable")
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _cgroup_rooms() -> Iterator[Room]:
    """One for this process's cgroup (version 2) and each of its parents that has a limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if not line.startswith("0::/"):
            continue
        group = _CGROUP_ROOT / line.removeprefix("0::/")
        for directory in (group, *group.parents):
            if directory == _CGROUP_ROOT.parent:
                break
            room = cgroup_room(directory)
            if room is not None:
                yield room


def cgroup_room(directory: Path) -> Room | None:
    """Room below one control group's memory.max; None where there is no limit."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        current_bytes = int((directory / "memory.current").read_text())
        statistics = (directory / "memory.stat").read_text()
    except OSError:
        return None  # the root group, or no memory controller: no limit of this kind
    if limit == "max":
        return None
    usage = {name: int(value) for name, value in (line.split() for line in statistics.splitlines())}
    # The kernel gives file cache back before it refuses; shared memory is counted in `file` but stays.
    reclaimable_bytes = usage.get("file", 0) - usage.get("shmem", 0)
    return Room(max(0, int(limit) - current_bytes + reclaimable_bytes), "memory.max of the control group")
