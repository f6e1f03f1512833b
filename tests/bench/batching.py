"""What batching gains, and how early the first rows of a request of many pictures are there.

    python -m tests.bench.batching [--rounds N]

The larger small checkpoint in float32 on one CPU thread. Pictures per second: 64 pictures at a time, each a
request, of a daemon as it is, of one with --max-batch-size 1, and of the bare tower in a loop over batches
made by hand (preprocessing included, in the same thread). Streaming: one request of 16 pictures with
wait=shape, from the request to its first rows and to all of them.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shm.client import connect
from tests.bench.control_plane import make_checkpoint
from tests.bench.report import Report, Target
from tests.bench.traffic import Traffic, body_of
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.pictures import picture_bytes

SIDES_PIXELS = (56, 112, 224)
PICTURES = 64
BATCH_SIZES = (1, 8, 32, 64)
STREAMED_ITEMS, STREAMED_SIDE = 16, 224
OPTIONS = ("--dtype", "float32", "--segment-size", "256MiB", "--lease-timeout", "1", "--max-batch-size")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.batching")
    parser.add_argument("--rounds", type=int, default=3, help="at 56x56; the best counts")
    parser.add_argument("--by-hand", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        print(json.dumps(encode_by_hand(arguments.by_hand, arguments.rounds)))
        return
    report = Report("batching")
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory:
        checkpoint = str(make_checkpoint(Path(directory) / "qwen2_vl"))
        command = [sys.executable, "-m", "tests.bench.batching", "--rounds", str(arguments.rounds)]
        by_hand = json.loads(subprocess.check_output([*command, "--by-hand", checkpoint], cwd=REPOSITORY))
        with Daemon(checkpoint, *OPTIONS, str(PICTURES), workers=1) as daemon:
            batched = asyncio.run(throughputs(daemon, arguments.rounds))
            streamed = [stream(daemon) for _ in range(arguments.rounds)]
        with Daemon(checkpoint, *OPTIONS, "1", workers=1) as daemon:
            alone = asyncio.run(throughputs(daemon, arguments.rounds))
    add_gains(report, batched, alone, by_hand)
    add_streaming(report, streamed)
    report.finish()


async def throughputs(daemon: Daemon, rounds: int) -> dict[int, float]:
    """Pictures per second by side, the best of the rounds."""
    traffic = Traffic(daemon.http_socket)
    best = {}
    for side in SIDES_PIXELS:
        bodies = [body_of(picture_bytes(side, side, seed)) for seed in range(PICTURES)]
        rates = []
        await traffic.closed_loop(bodies, PICTURES, PICTURES // 4)
        for _ in range(rounds if side == SIDES_PIXELS[0] else 1):
            begin_s = time.perf_counter()
            outcomes = await traffic.closed_loop(bodies, PICTURES, PICTURES)
            rates.append(len(outcomes) / (time.perf_counter() - begin_s))
            assert all(outcome.status == 200 for outcome in outcomes)
        best[side] = max(rates)
    traffic.close()
    return best


def encode_by_hand(checkpoint: str, rounds: int) -> dict[int, float]:
    """Pictures per second by side of the tower alone, with the best batch size; in a process of its own."""
    import torch

    from gpu_workers.families.base import MediaItem
    from gpu_workers.families.registry import load_on
    from tests.gpu_workers.harness import worker_config

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

    best = {}
    with torch.inference_mode():
        for side in SIDES_PIXELS:
            files = [picture_bytes(side, side, seed) for seed in range(PICTURES)]
            items = [MediaItem("image", (memoryview(file),)) for file in files]
            repeats = rounds if side == SIDES_PIXELS[0] else 1
            encode_all(items[:8], 8)
            best[side] = max(encode_all(items, size) for size in BATCH_SIZES for _ in range(repeats))
    return best


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


def add_gains(
    report: Report, batched: dict[int, float], alone: dict[int, float], by_hand: dict[str, float]
) -> None:
    """A row for each picture size; the two promises are about the smallest."""
    for side in SIDES_PIXELS:
        hand = by_hand[str(side)]
        report.add_row(
            f"{side}x{side}",
            batched_s=batched[side],
            one_by_one_s=alone[side],
            by_hand_s=hand,
            gain=batched[side] / alone[side],
            of_by_hand=batched[side] / hand,
        )
    small = SIDES_PIXELS[0]
    report.add_target(Target("gain over --max-batch-size 1 at 56x56", batched[small] / alone[small], ">=", 2))
    report.add_target(
        Target("of the best batch made by hand at 56x56", batched[small] / by_hand[str(small)], ">=", 0.9)
    )


def add_streaming(report: Report, streamed: list[tuple[float, float]]) -> None:
    """The first rows beside all rows."""
    first_ms = statistics.median(first_s for first_s, _ in streamed) * 1000
    all_ms = statistics.median(all_s for _, all_s in streamed) * 1000
    report.add_row(
        f"{STREAMED_ITEMS} of {STREAMED_SIDE}x{STREAMED_SIDE}, streamed",
        first_rows_ms=first_ms,
        all_rows_ms=all_ms,
    )
    report.add_target(Target("first rows over all rows", first_ms / all_ms, "<=", 1 / 6))


if __name__ == "__main__":
    main()
