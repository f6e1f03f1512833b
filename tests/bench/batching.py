"""What batching gains, how soon the first rows of a request of many pictures are there, what a bad one costs.

    python -m tests.bench.batching [--rounds N]

The larger small checkpoint in float32 on one CPU thread. Pictures per second: 64 pictures at a time, each a
request, of a daemon as it is, of one with --max-batch-size 1, and of the bare tower in a loop over batches
made by hand (preprocessing included, in the same thread); in turns, while the other two sleep. Streaming: one
request of 16 pictures with wait=shape, from the request to its first rows and to all of them. One bad picture
among 31 good ones: see tests.bench.isolation.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shm.client import connect
from tests.bench.control_plane import make_checkpoint
from tests.bench.isolation import add_isolation, bad_among_good, forwarded_again
from tests.bench.report import Report, Target
from tests.bench.traffic import Traffic, body_of
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.pictures import picture_bytes

SIDES_PIXELS = (56, 112, 224)
PICTURES = 64
BATCH_SIZES = (1, 8, 32, 64)
STREAMED_ITEMS, STREAMED_SIDE, STREAMS = 16, 224, 7
OPTIONS = ("--dtype", "float32", "--segment-size", "256MiB", "--lease-timeout", "1", "--max-batch-size")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.batching")
    parser.add_argument("--rounds", type=int, default=3, help="at 56x56; the best counts")
    parser.add_argument("--by-hand", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        answer_by_hand(arguments.by_hand)
        return
    report = Report("batching")
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory:
        checkpoint = str(make_checkpoint(Path(directory) / "qwen2_vl"))
        with (
            by_hand(checkpoint) as ask,
            Daemon(checkpoint, *OPTIONS, str(PICTURES), workers=1) as batched,
            Daemon(checkpoint, *OPTIONS, "1", workers=1) as alone,
        ):
            for side in SIDES_PIXELS:
                rounds = arguments.rounds if side == SIDES_PIXELS[0] else 1
                turns = [(rate(batched, side), rate(alone, side), ask(side)) for _ in range(rounds)]
                add_gain(report, side, *map(max, zip(*turns, strict=True)))
            streamed = [stream(batched) for _ in range(STREAMS)]
            good, bad = asyncio.run(bad_among_good(batched))
            forwarded = ask(0)
    add_streaming(report, streamed)
    plot(report)
    add_isolation(report, good, bad, forwarded)
    report.finish()


def rate(daemon: Daemon, side: int) -> float:
    """Pictures per second, of pictures of this side."""
    return asyncio.run(throughput(daemon, side))


async def throughput(daemon: Daemon, side: int) -> float:
    """See rate."""
    traffic = Traffic(daemon.http_socket)
    bodies = [body_of(picture_bytes(side, side, seed)) for seed in range(PICTURES)]
    await traffic.closed_loop(bodies, PICTURES, PICTURES // 4)
    begin_s = time.perf_counter()
    outcomes = await traffic.closed_loop(bodies, PICTURES, PICTURES)
    took_s = time.perf_counter() - begin_s
    assert all(outcome.status == 200 for outcome in outcomes)
    traffic.close()
    return len(outcomes) / took_s


@contextlib.contextmanager
def by_hand(checkpoint: str) -> Iterator[Callable[[int], float]]:
    """A process with the tower alone. Ask it for its pictures per second by a side, for the rest by 0."""
    command = [sys.executable, "-m", "tests.bench.batching", "--by-hand", checkpoint]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def ask(side: int) -> float:
            print(side, file=asks, flush=True)
            return float(json.loads(answers.readline()))

        try:
            yield ask
        finally:
            asks.close()


def answer_by_hand(checkpoint: str) -> None:
    """That process: the tower in a loop with the best batch size; and a part of tests.bench.isolation."""
    import torch

    from gpu_workers.families.base import MediaItem
    from gpu_workers.families.registry import load_on
    from tests.gpu_workers.harness import worker_config

    logging.disable(logging.WARNING)  # forwards that are made to fail
    torch.set_num_threads(1)
    config = worker_config(checkpoint=checkpoint, tower="auto", dtype="float32")
    family = load_on(config, torch.device("cpu"))

    def encode_all(items: list[MediaItem], batch_size: int) -> float:
        begin_s = time.perf_counter()
        for start in range(0, len(items), batch_size):
            batch = []
            for item in items[start : start + batch_size]:
                plan = family.inspect(item)
                assert plan is not None, "a picture's header tells its size"
                batch.append(family.preprocess(item, plan))
            family.forward(batch)
        return len(items) / (time.perf_counter() - begin_s)

    with torch.inference_mode():
        for line in sys.stdin:
            side = int(line)
            if side == 0:
                print(json.dumps(forwarded_again(checkpoint)), flush=True)
                continue
            files = [picture_bytes(side, side, seed) for seed in range(PICTURES)]
            items = [MediaItem("image", (memoryview(file),)) for file in files]
            encode_all(items[:8], 8)
            print(json.dumps(max(encode_all(items, size) for size in BATCH_SIZES)), flush=True)


def stream(daemon: Daemon) -> tuple[float, float]:
    """Seconds to the first picture's rows and to all rows of one request, whose rows are then compared with
    those of an ordinary one."""
    files = [picture_bytes(STREAMED_SIDE, STREAMED_SIDE, seed) for seed in range(STREAMED_ITEMS)]
    with connect(daemon.attach_socket) as session:
        begin_s = time.perf_counter()
        answer = daemon.http.encode(files, wait="shape")
        with session.attach(answer.handle) as view:
            view.wait_rows(answer.json["items"][0]["row_count"], 60)
            first_s = time.perf_counter() - begin_s
            view.wait_ready(60)
            all_s = time.perf_counter() - begin_s
            with session.attach(daemon.http.encode(files).handle) as whole:
                assert np.allclose(view.numpy(), whole.numpy(), atol=1e-4), "streamed rows are wrong"
    return first_s, all_s


def add_gain(report: Report, side: int, batched: float, alone: float, hand: float) -> None:
    """A row for each picture size; the two promises are about the smallest."""
    gain, of_by_hand = batched / alone, batched / hand
    report.add_row(
        f"{side}x{side}",
        batched_s=batched,
        one_by_one_s=alone,
        by_hand_s=hand,
        gain=gain,
        of_by_hand=of_by_hand,
    )
    if side == SIDES_PIXELS[0]:
        report.add_target(Target(f"gain over --max-batch-size 1 at {side}x{side}", gain, ">=", 2))
        report.add_target(Target(f"of the best batch made by hand at {side}x{side}", of_by_hand, ">=", 0.9))


def add_streaming(report: Report, streamed: list[tuple[float, float]]) -> None:
    """The first rows beside all rows."""
    first_ms = statistics.median(first_s for first_s, _ in streamed) * 1000
    all_ms = statistics.median(all_s for _, all_s in streamed) * 1000
    share = statistics.median(first_s / all_s for first_s, all_s in streamed)
    report.add_row(
        f"{STREAMED_ITEMS} of {STREAMED_SIDE}x{STREAMED_SIDE}, streamed",
        first_rows_ms=first_ms,
        all_rows_ms=all_ms,
    )
    report.add_target(Target("first rows over all rows", share, "<=", 1 / 6))


def plot(report: Report) -> None:
    """Pictures per second by side, for the daemon and its two peers."""
    import matplotlib.pyplot as plt

    rows = report.rows[: len(SIDES_PIXELS)]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    labels = {
        "by_hand_s": "tower alone, best batch made by hand",
        "batched_s": "daemon, 64 requests at once",
        "one_by_one_s": "daemon with --max-batch-size 1",
    }
    for number, (column, label) in enumerate(labels.items()):
        places = [place + (number - 1) * 0.27 for place in range(len(rows))]
        axes.bar(places, [float(row[column]) for row in rows], width=0.25, label=label)
    axes.set_xticks(range(len(rows)), [str(row["name"]) for row in rows])
    axes.set_yscale("log")
    axes.set_ylabel("pictures per second")
    axes.legend()
    figure.tight_layout()
    figure.savefig(report.plot_path(), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
