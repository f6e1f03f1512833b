"""Open-loop load: what becomes of latency at 50, 80, 95 and 120 % of what the daemon can do.

    python -m tests.bench.load [--seconds N]

A real daemon with one CPU worker and the larger small checkpoint; pictures of mixed sizes arrive as a Poisson
process. Capacity is measured before each level, with as many requests at once as are ever admitted. queue is
all waiting: in rings, for a thread, for the device. Milliseconds; total counts from the intended moment, at
the client.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.control_plane import make_checkpoint
from tests.bench.report import Report, Target
from tests.bench.traffic import Outcome, Traffic, body_of, percentile
from tests.e2e.daemon import Daemon
from tests.e2e.pictures import picture_bytes

SIDES_PIXELS = (56, 56, 56, 84, 84, 112)
SHARES = (0.5, 0.8, 0.95, 1.2)
STEPS = ("queue", "preprocess", "forward", "copy", "total")
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
MAX_QUEUED = 32
WARM_UP, CAPACITY_REQUESTS = 64, 256
REFUSED_LIMIT_MS, P99_RATIO_LIMIT = 50.0, 2.0


@dataclass(frozen=True)
class Level:
    """What one share of capacity gave."""

    share: float
    capacity_s: float  # requests per second, measured just before
    seconds: float
    accepted: list[Outcome]
    refused: list[Outcome]

    def times_ms(self, step: str) -> list[float]:
        """One step of every accepted request."""
        if step == "total":
            return [outcome.total_s * 1000 for outcome in self.accepted]
        timings = [outcome.answer["timings"] for outcome in self.accepted]
        if step == "queue":
            return [max(0.0, each["total"] - sum(each[name] for name in _WORK)) for each in timings]
        return [each[step] for each in timings]


_WORK = ("ingest", "preprocess", "forward", "copy")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each level")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory:
        checkpoint = make_checkpoint(Path(directory) / "qwen2_vl")
        options = ("--dtype", "float32", "--segment-size", "256MiB", "--lease-timeout", "1")
        with Daemon(str(checkpoint), *options, "--max-queued-requests", str(MAX_QUEUED), workers=1) as daemon:
            levels = asyncio.run(measure(daemon, seconds))
            lag_ms = daemon.http.server_info()["event_loop"]["worst_cpu_ms"]
    show(levels, lag_ms)


async def measure(daemon: Daemon, seconds: float) -> list[Level]:
    """Every level, by the capacity that was measured just before it."""
    generator = random.Random(0)
    bodies = [
        body_of(picture_bytes(side, side, seed))
        for seed, side in enumerate(generator.choices(SIDES_PIXELS, k=64))
    ]
    traffic = Traffic(daemon.http_socket)
    try:
        await traffic.closed_loop(bodies, MAX_QUEUED, WARM_UP)
        return [
            await run_level(traffic, bodies, await capacity_of(traffic, bodies), share, seconds, generator)
            for share in SHARES
        ]
    finally:
        traffic.close()


async def capacity_of(traffic: Traffic, bodies: Sequence[bytes]) -> float:
    """Requests per second when there is always one more."""
    begin_s = time.perf_counter()
    outcomes = await traffic.closed_loop(bodies, MAX_QUEUED, CAPACITY_REQUESTS)
    assert all(outcome.status == 200 for outcome in outcomes), "the capacity was measured with refusals"
    return CAPACITY_REQUESTS / (time.perf_counter() - begin_s)


async def run_level(
    traffic: Traffic,
    bodies: Sequence[bytes],
    capacity: float,
    share: float,
    seconds: float,
    generator: random.Random,
) -> Level:
    """Poisson arrivals at this share of capacity."""
    moments_s = []
    moment_s = generator.expovariate(share * capacity)
    while moment_s < seconds:
        moments_s.append(moment_s)
        moment_s += generator.expovariate(share * capacity)
    begin_s = time.perf_counter()
    outcomes = await traffic.open_loop(bodies, moments_s)
    took_s = time.perf_counter() - begin_s
    accepted = [outcome for outcome in outcomes if outcome.status == 200]
    refused = [outcome for outcome in outcomes if outcome.status in (429, 503)]
    assert len(accepted) + len(refused) == len(outcomes), "an answer that is neither rows nor backpressure"
    return Level(share, capacity, took_s, accepted, refused)


def show(levels: list[Level], lag_ms: float) -> None:
    """Table, targets, plot."""
    report = Report("load")
    for level in levels:
        report.add_row(f"capacity before {level.share:.0%}", requests_s=level.capacity_s)
        for step in STEPS:
            times_ms = level.times_ms(step)
            columns = {f"{name}_ms": percentile(times_ms, share) for name, share in QUANTILES.items()}
            if step == "total":
                rates = {"requests_s": len(level.accepted) / level.seconds, "refused": len(level.refused)}
                report.add_row(f"{level.share:.0%} {step}", **rates, **columns)
            else:
                report.add_row(f"{level.share:.0%} {step}", requests_s=None, refused=None, **columns)
    report.add_row("event loop, worst callback", p99_ms=None, worst_ms=lag_ms)
    p99_ms = {level.share: percentile(level.times_ms("total"), 0.99) for level in levels}
    report.add_target(
        Target(
            "p99 of accepted at 120 % over that at 95 %", p99_ms[1.2] / p99_ms[0.95], "<=", P99_RATIO_LIMIT
        )
    )
    refused_ms = [outcome.total_s * 1000 for outcome in levels[-1].refused]
    report.add_target(
        Target("p99 of refused at 120 %, ms", percentile(refused_ms, 0.99), "<=", REFUSED_LIMIT_MS)
    )
    plot(report, levels)
    report.finish()


def plot(report: Report, levels: list[Level]) -> None:
    """The distribution of total latency at every level."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for level in levels:
        times_ms = sorted(level.times_ms("total"))
        shares = [(rank + 1) / len(times_ms) for rank in range(len(times_ms))]
        axes.plot(times_ms, shares, label=f"{level.share:.0%} of capacity, {len(level.refused)} refused")
    axes.set_xscale("log")
    axes.set_xlabel("latency from the intended moment, ms")
    axes.set_ylabel("share of accepted requests")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(report.plot_path(), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
