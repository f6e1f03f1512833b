"""What the kernel says of a process: processor time and peak memory. Used by the benchmarks."""

import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int | str) -> int:
    """The most memory that was ever resident (VmHWM), shared memory that it touched included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads so far, in steps of 10 ms."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_SECOND
