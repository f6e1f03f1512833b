"""python -m tests.bench.ring: 128-byte messages between two processes, our ring beside what others use.

Round after round every mechanism gets its turn between two fresh processes, on cores 0 and 1 where they
exist. A figure is the median over the rounds; a ratio is taken inside a round, then its median, so that a
neighbour who takes a core for a while spoils one round and not one side of a comparison.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.report import Report, Target
from tests.bench.ring_mechanisms import (
    SPIN_NS,
    FasterFifo,
    Iceoryx2,
    Mechanism,
    Pipe,
    Queues,
    RingEventfd,
    RingFutex,
    ZmqAsyncio,
    ZmqAsyncioBoth,
    ZmqPair,
    remove_iceoryx2_leftovers,
)
from tests.bench.ring_streams import OneWay, RingOneWay, ZmqOneWay

_FORK = multiprocessing.get_context("fork")
_WARM_UP_COUNT = 200
_OURS, _THEIRS = "#1b6ca8", "#b8bec4"


class Entry(NamedTuple):
    """A mechanism in the race: how it is built, and how many round trips make a round."""

    build: Callable[[Path], Mechanism]
    round_trip_count: int


SPIN, FUTEX, EVENTFD = "ring, spin then futex", "ring, futex", "ring, eventfd to uvloop + futex"
ZMQ, ZMQ_ASYNCIO, ZMQ_ASYNCIO_BOTH = "pyzmq ipc", "pyzmq asyncio, one end", "pyzmq asyncio, both ends"
ICEORYX2 = "iceoryx2, spin"
RACE = {
    SPIN: Entry(partial(RingFutex, spin_ns=SPIN_NS), 20_000),
    ICEORYX2: Entry(Iceoryx2, 5_000),
    FUTEX: Entry(partial(RingFutex, spin_ns=0), 3_000),
    EVENTFD: Entry(RingEventfd, 3_000),
    ZMQ: Entry(ZmqPair, 2_000),
    ZMQ_ASYNCIO: Entry(ZmqAsyncio, 1_500),
    ZMQ_ASYNCIO_BOTH: Entry(ZmqAsyncioBoth, 1_500),
    "multiprocessing.Pipe": Entry(Pipe, 2_000),
    "multiprocessing.Queue": Entry(Queues, 1_500),
    "faster-fifo": Entry(FasterFifo, 2_000),
}
STREAMS: dict[str, tuple[Callable[[Path], OneWay], int]] = {
    SPIN: (RingOneWay, 1_000_000),
    ZMQ: (ZmqOneWay, 60_000),
}


class RoundTrips(NamedTuple):
    """One mechanism in one round."""

    p50_us: float
    p99_us: float


def main() -> None:
    """Run the rounds, print the report, draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ring", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    trips: dict[str, list[RoundTrips]] = {name: [] for name in RACE}
    rates: dict[str, list[float]] = {name: [] for name in STREAMS}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for name, entry in RACE.items():
            trips[name].append(_round_trips(entry))
        for name, (build, count) in STREAMS.items():
            rates[name].append(_messages_per_second(build, count))
    remove_iceoryx2_leftovers()
    report = _report(trips, rates)
    _plot(report)
    report.finish()


def _round_trips(entry: Entry) -> RoundTrips:
    count = entry.round_trip_count + _WARM_UP_COUNT
    with tempfile.TemporaryDirectory() as directory:
        mechanism = entry.build(Path(directory))
        durations_ns = _in_two_processes(partial(mechanism.measure, count), partial(mechanism.echo, count))
    cuts = statistics.quantiles(durations_ns[_WARM_UP_COUNT:], n=100, method="inclusive")
    return RoundTrips(cuts[49] / 1e3, cuts[98] / 1e3)


def _messages_per_second(build: Callable[[Path], OneWay], count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        stream = build(Path(directory))
        elapsed_ns = _in_two_processes(partial(stream.receive, count), partial(stream.send, count))
    return (count - 1) / elapsed_ns * 1e9


def _in_two_processes(measure: Callable[[], Any], other: Callable[[], None]) -> Any:
    """What measure returns, in a process on core 0, while other runs in one on core 1."""
    result, outlet = _FORK.Pipe(duplex=False)
    processes = [
        _FORK.Process(target=_run_on, args=(1, other)),
        _FORK.Process(target=_run_on, args=(0, measure, outlet)),
    ]
    for process in processes:
        process.start()
    outlet.close()
    try:
        return result.recv()
    finally:
        for process in processes:
            process.join()


def _run_on(core: int, work: Callable[[], Any], outlet: Connection | None = None) -> None:
    if core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})
    outcome = work()
    if outlet is not None:
        outlet.send(outcome)


def _report(trips: dict[str, list[RoundTrips]], rates: dict[str, list[float]]) -> Report:
    report = Report("ring")
    for name, rounds in trips.items():
        report.add_row(
            name,
            p50_us=statistics.median(trip.p50_us for trip in rounds),
            p99_us=statistics.median(trip.p99_us for trip in rounds),
            one_way_messages_per_second=statistics.median(rates[name]) if name in rates else None,
        )

    def times_faster(ours: str, theirs: str, target: float) -> None:
        ratios = [b.p50_us / a.p50_us for a, b in zip(trips[ours], trips[theirs], strict=True)]
        name = f"p50 of {theirs} / p50 of {ours}"
        report.add_target(Target(name, statistics.median(ratios), ">=", target))

    times_faster(SPIN, ZMQ, 50)
    times_faster(SPIN, ICEORYX2, 4)
    times_faster(EVENTFD, ZMQ_ASYNCIO_BOTH, 5)
    ratios = [a / b for a, b in zip(rates[SPIN], rates[ZMQ], strict=True)]
    name = f"one-way messages/s of {SPIN} / those of {ZMQ}"
    report.add_target(Target(name, statistics.median(ratios), ">=", 10))
    return report


def _plot(report: Report) -> None:
    """Horizontal bars of p50 with p99 as a tick, fastest on top, logarithmic."""
    import matplotlib.pyplot as plt

    rows = sorted(report.rows, key=lambda row: row["p50_us"], reverse=True)
    names = [row["name"] for row in rows]
    colours = [_OURS if name.startswith("ring") else _THEIRS for name in names]
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.4), layout="constrained")
    axes.barh(names, [row["p50_us"] for row in rows], color=colours, height=0.65)
    p99 = [row["p99_us"] for row in rows]
    axes.scatter(p99, names, marker="|", s=120, color="#30363c", label="p99", zorder=3)
    for row, colour in zip(rows, colours, strict=True):
        axes.annotate(
            f"{row['p50_us']:.3g} µs",
            (row["p50_us"], row["name"]),
            xytext=(-5, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
            color="white" if colour == _OURS else "black",
        )
    axes.set_xscale("log")
    axes.set_xlim(left=0.1)
    axes.set_xlabel("round trip of a 128-byte message between two processes, µs (bar: p50, tick: p99)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e6e9", zorder=0)
    axes.set_axisbelow(True)
    figure.savefig(report.plot_path(), dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
