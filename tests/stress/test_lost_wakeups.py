"""The doorbell at full speed, compiled as it ships; and that its fence is what keeps wake-ups.

The ring has one slot: the producer publishes the moment the consumer has emptied it, which is when the
consumer arms, and a lost wake-up stops both.
"""

import subprocess
from pathlib import Path

import pytest

from tests.needs import program
from tests.stress.compiled import build, changed

FLAGS = ("-O2", "-Wall", "-Wextra", "-DSLOT_COUNT=1")
COUNT = 200_000
PRODUCERS_FENCE = """    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(armed, memory_order_relaxed)"""

pytestmark = program("gcc", package="gcc")


def run(harness: Path, bell: str, count: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([harness, bell, str(count)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("bell", ["futex", "eventfd"])
def test_no_wake_up_is_lost_between_two_threads(tmp_path: Path, bell: str) -> None:
    finished = run(build(tmp_path / "threads", FLAGS), bell, COUNT)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_without_the_producers_fence_wake_ups_are_lost(tmp_path: Path) -> None:
    """The test above can see what it looks for (on a machine with two cores or more)."""
    unfenced = PRODUCERS_FENCE.partition("\n")[2]
    csrc = changed(tmp_path, "doorbell.c", PRODUCERS_FENCE, unfenced)
    flags = (*FLAGS, "-DA_LONG_TIME_NS=500000000")
    finished = run(build(tmp_path / "threads", flags, csrc), "futex", 100 * COUNT)
    assert finished.stderr == "lost wake-up\n"
