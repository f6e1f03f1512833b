"""`encoderd demo`: the whole way of one picture, on a checkpoint made on the spot, with a verdict.

Tells the story and owns the one temporary directory that holds everything written. Called by `app.cli`.
Model code runs only in child processes (`app.demo_daemon`), so this one stays light.
"""

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from app.demo_daemon import DemoDaemon, DemoFailed, child, run_module
from app.schema import EncodeAnswer

FAMILY = "qwen2_5_vl"
INTERRUPTED = 130
LINE_CHARACTERS = 76
SHARED_MEMORY = Path("/dev/shm")


def run() -> int:
    """0: the rows are right and nothing is left. 1: not so. 130: ended by Ctrl-C or SIGTERM, nothing left."""
    interrupts = _Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupts.handle)
    names_before = _shared_memory_names()
    try:
        with tempfile.TemporaryDirectory(prefix="encoderd-demo-") as directory:
            answer = _demonstrate(Path(directory))
        interrupts.check()
        _require_nothing_left(names_before)
    except DemoFailed as failure:
        print(f"\nFAIL: {failure}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The daemon is stopped, everything is removed.", flush=True)
        return INTERRUPTED
    print(
        f"\nPASS: {answer.rows} x {answer.dim} {answer.dtype} rows, mapped by another process without a copy,"
        "\n      equal Hugging Face's own bit for bit; nothing is left behind.",
        flush=True,
    )
    return 0


def _demonstrate(directory: Path) -> EncodeAnswer:
    checkpoint, picture = directory / "checkpoint", directory / "picture.jpg"
    _say("1. Make a small Qwen2.5-VL checkpoint with random weights, and a picture")
    with _timed("checkpoint"):
        run_module(directory, "gpu_workers.checkpoints", FAMILY, str(checkpoint))
    with _timed("picture"):
        run_module(directory, "gpu_workers.demo", "draw", str(picture))

    _say("2. Start the daemon: one worker, a segment of 256 MiB")
    started = time.perf_counter()
    with DemoDaemon(checkpoint, directory) as daemon:
        daemon.wait_until_ready(show_status=_say_indented)
        _say_took("ready", time.perf_counter() - started)

        _say(f"3. POST {daemon.url}/encode, a JPEG of {picture.stat().st_size / 1000:.0f} kB")
        with _timed("answered with a handle"):
            answer = daemon.encode(picture)
        _show(answer)

        _say("4. Map the rows in another process, and ask Hugging Face about the same file")
        _check(directory, checkpoint, picture, answer)

        _say("5. Stop the daemon")
        with _timed("stopped"):
            daemon.stop()
    return answer


def _show(answer: EncodeAnswer) -> None:
    timings = answer.timings
    stages = {
        "ingest": timings.ingest,
        "queue": timings.queue,
        "preprocess": timings.preprocess,
        "forward": timings.forward,
        "copy": timings.copy,
    }
    _say_indented(", ".join(f"{stage} {milliseconds:.1f} ms" for stage, milliseconds in stages.items()))
    _say_indented(
        f"shape ({answer.rows}, {answer.dim}) {answer.dtype}: {answer.embedding_size:,} bytes, mapped"
    )


def _check(directory: Path, checkpoint: Path, picture: Path, answer: EncodeAnswer) -> None:
    """The other process says what it sees itself; its exit status is the verdict."""
    arguments = ("check", str(checkpoint), str(picture))
    with child(directory, "gpu_workers.demo", *arguments, stdin=subprocess.PIPE) as checker:
        checker.communicate(msgspec.json.encode(answer.handle))
    if checker.returncode != 0:
        raise DemoFailed("the mapped rows are not what Hugging Face computes")


def _require_nothing_left(names_before: set[str]) -> None:
    left = _shared_memory_names() - names_before
    if left:
        raise DemoFailed(f"left in {SHARED_MEMORY}: {', '.join(sorted(left))}")


def _shared_memory_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("encoderd-*")}


class _Interrupts:
    """Signals as KeyboardInterrupt, and remembered: Python drops what is raised in its hooks at a fork."""

    def __init__(self) -> None:
        self._asked = False

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        """A signal handler."""
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """KeyboardInterrupt if there was one that nobody saw."""
        if self._asked:
            raise KeyboardInterrupt


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    _say_took(what, time.perf_counter() - start)


def _say_took(what: str, seconds: float) -> None:
    duration = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
    dots = "." * (LINE_CHARACTERS - len(what) - len(duration) - 5)
    _say_indented(f"{what} {dots} {duration}")


def _say_indented(text: str) -> None:
    _say(f"   {text}")


def _say(text: str) -> None:
    print(text, flush=True)
