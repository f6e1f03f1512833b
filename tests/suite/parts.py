"""The whole suite, two of its folders at a time: `python -m tests.suite.parts`, which `make test` runs.

Many tests wait: for a process that loads torch, for a limit that ends something. Meanwhile the other folder's
have the cores. Arguments are pytest's options for every folder. A folder's output is shown whole when it has
ended; the last line is one such as pytest's own, about all of them.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AT_ONCE = 2
LONGEST_FIRST = ("e2e", "gpu_workers", "app", "gpu", "stress", "shm", "systemd")
COUNT = re.compile(r"(\d+) ([a-z]+)")


@dataclass(frozen=True)
class Outcome:
    """How one folder's tests ended."""

    folder: str
    status: int
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        """pytest's summary."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def counts(self) -> Counter[str]:
        """Tests by how they ended: passed, failed, and so on."""
        numbers = self.last_line.partition(" in ")[0]
        return Counter({word: int(number) for number, word in COUNT.findall(numbers)})


def folders(tests: Path) -> list[str]:
    """Every folder with tests, the longest first, so that no long one is left alone at the end."""
    found = sorted({path.parent.name for path in tests.glob("*/test_*.py")})
    return sorted(found, key=lambda name: LONGEST_FIRST.index(name) if name in LONGEST_FIRST else sys.maxsize)


def run_folder(tests: Path, folder: str, options: Sequence[str], interrupted: threading.Event) -> Outcome:
    """One pytest process; none any more after one was interrupted."""
    if interrupted.is_set():
        return Outcome(folder, pytest.ExitCode.INTERRUPTED, 0.0, "not started")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(tests / folder), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == pytest.ExitCode.INTERRUPTED:
        interrupted.set()
    return Outcome(folder, done.returncode, time.monotonic() - started, done.stdout)


def run_all(tests: Path, options: Sequence[str]) -> list[Outcome]:
    """Every folder, each shown when it has ended."""
    interrupted = threading.Event()
    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(run_folder, tests, name, options, interrupted) for name in folders(tests)]
        print(f"{len(runs)} folders, {AT_ONCE} at a time; each is shown when it has ended.", flush=True)
        for run in as_completed(runs):
            outcome = run.result()
            print(f"\n--- {outcome.folder}\n{outcome.output}", end="", flush=True)
            outcomes.append(outcome)
    return outcomes


def failed(outcomes: Iterable[Outcome]) -> bool:
    """A folder where the options select nothing is fine if another has something."""
    statuses = {outcome.status for outcome in outcomes}
    return statuses - {pytest.ExitCode.NO_TESTS_COLLECTED} != {pytest.ExitCode.OK}


def main(tests: Path, options: Sequence[str]) -> int:
    # Ctrl-C reaches every pytest by itself; this process waits for what they say. (An ignored signal would
    # be inherited, a handler is not.)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    started = time.monotonic()
    outcomes = run_all(tests, options)
    print()
    for outcome in outcomes:
        print(f"{outcome.folder:<12} {outcome.seconds:7.1f} s  {outcome.last_line}")
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    numbers = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    print(f"{numbers or 'nothing ran'} in {time.monotonic() - started:.2f}s")
    return 1 if failed(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(TESTS, sys.argv[1:]))
