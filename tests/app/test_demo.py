"""`encoderd demo` as a user runs it: the real thing, whole, and interrupted at its two slow places."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.demo import INTERRUPTED


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the demo puts its directory, so that a test sees what it leaves."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    return directory


@contextmanager
def _demo(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A running demo that sees `temporary` as the place for temporary files."""
    with subprocess.Popen(
        [sys.executable, "-m", "app", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_demo_maps_the_right_rows_and_leaves_nothing(temporary: Path) -> None:
    with _demo(temporary) as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    verdict = output.split("\n\n")[-1]
    assert re.match(r"PASS: \d+ x \d+ float32 rows", verdict), output
    for measured in ("checkpoint", "ready", "forward", "handle to usable array", "stopped"):
        assert measured in output
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("1. ", id="while the checkpoint is made"),
        pytest.param("2. ", id="while the daemon loads"),
        pytest.param("4. ", id="while the rows are compared"),
    ],
)
def test_an_interrupted_demo_leaves_nothing(temporary: Path, step: str) -> None:
    with _demo(temporary) as demo:
        assert demo.stdout is not None
        seen = [next(line for line in demo.stdout if line.startswith(step))]
        demo.send_signal(signal.SIGINT)  # to the demo alone, as it arranges for its children
        seen += demo.stdout
        status = demo.wait()
    assert status == INTERRUPTED, "".join(seen)
    assert list(temporary.iterdir()) == []
