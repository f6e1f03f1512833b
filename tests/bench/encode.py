"""python -m tests.bench.encode: a daemon over HTTP against the fastest script for the same job.

64 pictures, thumbnails to 4K, on the checkpoint of size "bench", whose processor is told to make at most 256
rows of a picture (the lower end of what Qwen recommends: a CPU forwards it in a bearable time). A client
keeps requests in flight, attaches every answer and releases it. The scripts are in encode_scripts.py.

A round gives the daemon and the hand-written script their turn, the order changing from round to round; the
ratios are taken inside a round, then their median, so that a neighbour who takes a core for a while spoils
one round and not one side. Every turn of the daemon sends other bytes (a counter behind the JPEG's end), so
that nothing can be remembered.
"""

import argparse
import base64
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from shm.client import Session, connect
from shm.messages import Handle
from tests.bench.photographs import photograph
from tests.bench.processes import cpu_seconds, peak_bytes
from tests.bench.report import REPOSITORY, Report, Target
from tests.e2e.daemon import Daemon

_OURS, _HAND, _PLAIN = "#1b6ca8", "#b8bec4", "#dfc9a4"
_TORCH_THREADS: Final = 1
_PREPARE_THREADS: Final = 2
_CONNECTIONS: Final = 16
_BATCHES: Final = (1, 2, 4, 8, 16)
_SEARCH_COUNT: Final = 16
_PLAIN_ROUNDS: Final = 3
_MAX_PIXELS: Final = 256 * 28 * 28
# (width, height), how many: what a page of pictures is made of.
_SIZES: Final = (
    ((160, 120), 12),
    ((120, 160), 10),
    ((200, 200), 10),
    ((256, 192), 8),
    ((640, 480), 10),
    ((1024, 768), 4),
    ((1920, 1080), 6),
    ((3840, 2160), 4),
)


class Turn(NamedTuple):
    """One side in one round, over all pictures."""

    seconds: float
    cpu_seconds: float


class Round(NamedTuple):
    """Both sides in one round."""

    ours: Turn
    hand: Turn


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.encode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory, ExitStack() as stack:
        checkpoint = _make_checkpoint(Path(directory, "checkpoint"))
        pictures = _pictures()
        folder = _write(Path(directory, "pictures"), pictures)
        hand = stack.enter_context(Script("hand", checkpoint, folder))
        plain = stack.enter_context(Script("plain", checkpoint, folder))
        daemon = stack.enter_context(
            Daemon(str(checkpoint), "--preprocess-threads", str(_PREPARE_THREADS), workers=1)
        )
        hand.wait_ready()
        plain.wait_ready()
        ours = stack.enter_context(Client(daemon, pictures))
        _check(ours, hand, Path(directory, "rows.npy"))
        batch_items = _best_batch(hand)
        rounds = [_round(number, ours, hand, batch_items) for number in range(options.rounds)]
        plain.turn(len(pictures), 1)  # to warm it up
        plains = [plain.turn(len(pictures), 1) for _ in range(_PLAIN_ROUNDS)]
        report = _report(rounds, plains, batch_items, ours, hand, plain)
    if not options.no_plot:
        _plot(report)
    report.finish()


# --- the job ---


def _make_checkpoint(directory: Path) -> Path:
    command = [sys.executable, "-m", "gpu_workers.checkpoints", "qwen2_vl", str(directory)]
    subprocess.run([*command, "--size", "bench"], cwd=REPOSITORY, check=True, stderr=subprocess.DEVNULL)
    for path in directory.glob("*processor_config.json"):
        config = json.loads(path.read_text())
        picture = config.get("image_processor", config)
        picture["size"] = {"shortest_edge": 56 * 56, "longest_edge": _MAX_PIXELS}
        picture.pop("max_pixels", None)
        path.write_text(json.dumps(config))
    return directory


def _pictures() -> list[bytes]:
    sizes = [size for size, count in _SIZES for _ in range(count)]
    random.Random(64).shuffle(sizes)
    return [photograph(width, height, seed) for seed, (width, height) in enumerate(sizes)]


def _write(directory: Path, pictures: list[bytes]) -> Path:
    directory.mkdir()
    for number, picture in enumerate(pictures):
        (directory / f"{number:03}.jpg").write_bytes(picture)
    return directory


# --- the scripts' side ---


class Script:
    """One of encode_scripts, running."""

    def __init__(self, kind: str, checkpoint: Path, pictures: Path) -> None:
        self.peak_bytes = 0
        arguments = [kind, str(checkpoint), str(pictures), str(_TORCH_THREADS), str(_PREPARE_THREADS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.encode_scripts", *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as the daemon: the kernel shares a busy machine out by session
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_ready(self) -> None:
        """Sleeps until it has loaded."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the script has failed"

    def turn(self, count: int, batch_items: int, rows_path: str = "") -> Turn:
        """The first `count` pictures, batch_items to a forward."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"count": count, "batch_items": batch_items, "rows_path": rows_path}
        print(json.dumps(command), file=self._process.stdin, flush=True)
        result = json.loads(self._process.stdout.readline())
        self.peak_bytes = result["peak_bytes"]
        return Turn(result["seconds"], result["cpu_seconds"])


def _best_batch(hand: Script) -> int:
    """What the script's author would find by trying."""
    times = {items: hand.turn(_SEARCH_COUNT, items).seconds for items in _BATCHES}
    print("hand-written script:", {items: f"{taken:.2f} s" for items, taken in times.items()}, flush=True)
    return min(times, key=lambda items: times[items])


# --- the daemon's side ---


class Client:
    """Keeps requests in flight at a daemon. Its own processor time is not the daemon's."""

    def __init__(self, daemon: Daemon, pictures: list[bytes]) -> None:
        self._daemon = daemon
        self._pictures = pictures
        self._turns = itertools.count()
        self._pids = [daemon.process.pid, *daemon.worker_pids()]

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._session: Session = self._stack.enter_context(connect(self._daemon.attach_socket))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def turn(self) -> Turn:
        """All pictures: from the first byte sent until every answer is attached."""
        bodies = self._bodies()
        cpu_started, started = self._cpu_seconds(), time.perf_counter()
        for _, handle in self._answers(bodies):
            self._session.attach(handle).release()
        seconds = time.perf_counter() - started
        return Turn(seconds, self._cpu_seconds() - cpu_started)

    def rows(self) -> npt.NDArray[np.float32]:
        """All pictures' rows, in order."""
        rows: dict[int, npt.NDArray[np.float32]] = {}
        for number, handle in self._answers(self._bodies()):
            with self._session.attach(handle) as view:
                rows[number] = view.numpy().copy()
        return np.concatenate([rows[number] for number in range(len(self._pictures))])

    def peaks(self) -> dict[str, int]:
        """Bytes of the control process and of the worker."""
        return {"control": peak_bytes(self._pids[0]), "worker": peak_bytes(self._pids[1])}

    def _bodies(self) -> list[bytes]:
        turn = next(self._turns).to_bytes(4, "little")
        return [_body(f"{number}-{turn.hex()}", data + turn) for number, data in enumerate(self._pictures)]

    def _answers(self, bodies: list[bytes]) -> Iterator[tuple[int, Handle]]:
        """(number, handle) as they come. The session is the caller's thread's alone."""
        todo = iter(list(enumerate(bodies)))  # list iterators may be shared by threads
        answers: SimpleQueue[tuple[int, Handle] | None] = SimpleQueue()
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            posts = [threads.submit(self._post, todo, answers) for _ in range(_CONNECTIONS)]
            for _ in posts:
                yield from iter(answers.get, None)  # until one connection has ended, in whatever order
            for post in posts:
                post.result()  # raises what ended it early

    def _post(
        self, todo: Iterator[tuple[int, bytes]], answers: "SimpleQueue[tuple[int, Handle] | None]"
    ) -> None:
        """One connection: pictures until there are none left, then None."""
        connection = self._daemon.http.connection()
        try:
            for number, body in todo:
                connection.request("POST", "/encode", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                assert response.status == 200, answer
                answers.put((number, msgspec.convert(answer["handle"], Handle)))
        finally:
            answers.put(None)
            connection.close()

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in self._pids)


def _body(request_id: str, picture: bytes) -> bytes:
    url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
    return json.dumps({"req_id": request_id, "mm_items": [url], "modality": "image"}).encode()


# --- the race ---


def _check(ours: Client, hand: Script, path: Path) -> None:
    """Both sides once: warms them up, and shows that they do the same job."""
    hand.turn(sum(count for _, count in _SIZES), 1, str(path))
    expected, rows = np.load(path), ours.rows()
    assert rows.shape == expected.shape
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)


def _round(number: int, ours: Client, hand: Script, batch_items: int) -> Round:
    count = sum(count for _, count in _SIZES)
    if number % 2:
        theirs = hand.turn(count, batch_items)
        one = Round(ours.turn(), theirs)
    else:
        mine = ours.turn()
        one = Round(mine, hand.turn(count, batch_items))
    print(
        f"round {number}: daemon {one.ours.seconds:.2f} s, {one.ours.cpu_seconds:.2f} CPU s; "
        f"script {one.hand.seconds:.2f} s, {one.hand.cpu_seconds:.2f} CPU s",
        flush=True,
    )
    return one


# --- the report ---


def _report(
    rounds: list[Round], plains: list[Turn], batch_items: int, ours: Client, hand: Script, plain: Script
) -> Report:
    report = Report("encode")
    peaks = ours.peaks()
    mine, theirs = [one.ours for one in rounds], [one.hand for one in rounds]
    _add(report, "encoderd over HTTP", mine, sum(peaks.values()))
    _add(report, f"hand-written script, {batch_items} to a batch", theirs, hand.peak_bytes)
    _add(report, "Pillow, AutoImageProcessor, forward", plains, plain.peak_bytes)
    for name, nbytes in peaks.items():
        report.add_row(f"encoderd: the {name} process", peak_mb=nbytes / 1e6)
    speed = statistics.median(one.hand.seconds / one.ours.seconds for one in rounds)
    cost = statistics.median(one.ours.cpu_seconds / one.hand.cpu_seconds for one in rounds)
    gain = statistics.median(one.seconds for one in plains) / statistics.median(one.seconds for one in mine)
    report.add_target(Target("images/s, times the hand-written script's", speed, ">=", 0.92))
    report.add_target(Target("CPU s per image, times the hand-written script's", cost, "<=", 1.08))
    report.add_target(Target("images/s, times the plain loop's", gain, ">=", 1.0))
    return report


def _add(report: Report, name: str, turns: list[Turn], nbytes: int) -> None:
    count = sum(count for _, count in _SIZES)
    report.add_row(
        name,
        images_per_s=count / statistics.median(turn.seconds for turn in turns),
        cpu_ms_per_image=statistics.median(turn.cpu_seconds for turn in turns) / count * 1e3,
        peak_mb=nbytes / 1e6,
    )


def _plot(report: Report) -> None:
    """One bar for each side: images/s, processor time, peak memory."""
    import matplotlib.pyplot as plt

    rows = report.rows[:3][::-1]
    panels = (("images_per_s", "images/s"), ("cpu_ms_per_image", "CPU ms per image"), ("peak_mb", "peak MB"))
    figure, all_axes = plt.subplots(1, 3, figsize=(10, 2.4), layout="constrained", sharey=True)
    for axes, (column, label) in zip(all_axes, panels, strict=True):
        bars = axes.barh(range(3), [row[column] for row in rows], 0.6, color=(_PLAIN, _HAND, _OURS))
        axes.bar_label(bars, [f"{row[column]:.3g}" for row in rows], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.set_yticks(range(3), [row["name"] for row in rows])
        axes.margins(x=0.2)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.savefig(report.plot_path(), dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
