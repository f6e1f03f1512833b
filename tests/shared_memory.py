"""What lies in /dev/shm under our names, beside other tests and daemons that come and go meanwhile."""

from __future__ import annotations

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOOKS = 1000


def shared_memory_names() -> set[str]:
    """Names below /dev/shm that look like ours."""
    return {path.name for path in SHARED_MEMORY.glob("encoderd-*")}


def names_that_stay(before: set[str]) -> set[str]:
    """Names that were not there before and that nobody takes away.

    Every region has a name of its own for as long as the function that creates it runs: one look may see
    somebody else's, many looks never see the same one unless it was left behind.
    """
    left = shared_memory_names() - before
    for _ in range(LOOKS):
        if not left:
            break
        left &= shared_memory_names()
    return left
