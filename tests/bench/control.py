"""What the control plane costs, with the stub tower: HTTP, sessions, and others.

    python -m tests.bench.control [--seconds N]

Every row is one closed-loop measurement: so many readers, spread over two processes, ask again as soon as
they have their answer. control_us and worker_us are CPU microseconds for each request, of all threads, as the
kernel counts them: who else uses the machine changes them less than it changes requests per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.control_load import Load
from tests.bench.report import Report, Target
from tests.e2e.daemon import REPOSITORY, Daemon, free_port

SMALL_BYTES, LARGE_BYTES = 1000, 1 << 20  # 1.4 MB as base64
WORKERS, READERS = (1, 2, 4, 8), (1, 16, 64)
PROCESSES = 2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Over HTTP nobody attaches here: the clock ends the leases.
OPTIONS = ("--tower", "stub", "--segment-size", "64MiB", "--arena-size", "256MiB", "--lease-timeout", "1")


@dataclass(frozen=True)
class Figures:
    """One measurement."""

    requests_s: float
    p50_us: float
    p99_us: float
    control_us: float
    worker_us: float | None = None


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.control")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    report = Report("control")
    bare = measure_peer("bare", report, seconds)
    dispatcher = measure_peer("dispatcher", report, seconds)
    by_workers: dict[str, dict[int, Figures]] = {"http": {}, "session": {}}
    by_readers: dict[str, dict[int, Figures]] = {"http": {}, "session": {}}
    with Daemon("none", *OPTIONS, workers=1) as daemon:
        large = {way: measure_ours(daemon, way, 16, LARGE_BYTES, report, seconds) for way in by_workers}
        for way, figures in by_readers.items():
            for readers in READERS:
                figures[readers] = measure_ours(daemon, way, readers, SMALL_BYTES, report, seconds)
            by_workers[way][1] = figures[16]
    for workers in WORKERS[1:]:
        with Daemon("none", *OPTIONS, workers=workers) as daemon:
            for way, figures in by_workers.items():
                figures[workers] = measure_ours(daemon, way, 16, SMALL_BYTES, report, seconds, workers)
    small = {way: figures[16] for way, figures in by_readers.items()}
    add_http_targets(report, bare, small["http"], large["http"])
    for way in by_workers:
        add_flat_target(report, way, "workers", by_workers[way])
        add_flat_target(report, way, "readers", by_readers[way])
    add_session_targets(report, small, large, dispatcher)
    report.finish()


def add_http_targets(report: Report, bare: dict[int, Figures], small: Figures, large: Figures) -> None:
    """Our CPU on top of the bare application's."""
    for name, ours, item_bytes, percent in (
        ("1 KB", small, SMALL_BYTES, 40),
        ("1.4 MB", large, LARGE_BYTES, 30),
    ):
        on_top = (ours.control_us / bare[item_bytes].control_us - 1) * 100
        report.add_target(
            Target(f"HTTP {name}: CPU on top of bare Hypercorn, percent", on_top, "<=", percent)
        )


def add_flat_target(report: Report, way: str, what: str, figures: dict[int, Figures]) -> None:
    """The cost with the most against the cost with one."""
    most = max(figures)
    grows = figures[most].control_us / figures[1].control_us
    report.add_target(Target(f"{way}: control's CPU with {most} {what} / with 1", grows, "<=", 1.2))


def add_session_targets(
    report: Report, small: dict[str, Figures], large: dict[str, Figures], dispatcher: dict[int, Figures]
) -> None:
    """Requests per second, whole system; and, beside it, of control alone (one core's worth)."""
    for name, figures, times in (("1 KB", small, 10), ("1 MB", large, 5)):
        ours, http = figures["session"], figures["http"]
        rate = ours.requests_s / http.requests_s
        report.add_target(Target(f"session {name}: requests/s against our HTTP", rate, ">=", times))
        cost = http.control_us / ours.control_us
        report.add_target(Target(f"session {name}: control's CPU against our HTTP's", cost, ">=", times))
    for name, figures, size in (("1 KB", small, SMALL_BYTES), ("1 MB", large, LARGE_BYTES)):
        rate = figures["session"].requests_s / dispatcher[size].requests_s
        report.add_target(Target(f"session {name}: requests/s against the dispatcher", rate, ">=", 5))


def measure_peer(kind: str, report: Report, seconds: float) -> dict[int, Figures]:
    """Small and large bodies at another server."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.bench.control_peers", kind, str(port)]
    found = {}
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        try:
            for item_bytes in (SMALL_BYTES, LARGE_BYTES):
                pids = children_of(server.pid)
                figures = measure("http", f"127.0.0.1:{port}", 16, item_bytes, seconds, server.pid, pids)
                found[item_bytes] = figures
                add_row(report, f"{kind}, {item_bytes} bytes", figures, workers=None, readers=16)
        finally:
            server.terminate()
    return found


def measure_ours(
    daemon: Daemon,
    way: str,
    readers: int,
    item_bytes: int,
    report: Report,
    seconds: float,
    workers: int = 1,
) -> Figures:
    """One way to our daemon."""
    address = daemon.attach_socket if way == "session" else f"127.0.0.1:{daemon.port}"
    figures = measure(way, address, readers, item_bytes, seconds, daemon.process.pid, daemon.worker_pids())
    add_row(report, f"{way}, {item_bytes} bytes", figures, workers, readers)
    return figures


def add_row(report: Report, name: str, figures: Figures, workers: int | None, readers: int) -> None:
    report.add_row(
        name,
        workers=workers,
        readers=readers,
        requests_s=figures.requests_s,
        p50_us=figures.p50_us,
        p99_us=figures.p99_us,
        control_us=figures.control_us,
        worker_us=figures.worker_us,
    )
    print(json.dumps(report.rows[-1]), file=sys.stderr, flush=True)


def measure(
    way: str, address: str, readers: int, item_bytes: int, seconds: float, control: int, workers: list[int]
) -> Figures:
    """Readers in up to PROCESSES processes, all begun together."""
    shares = [share for share in (readers // 2, readers - readers // 2) if share]
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(load_process(share, way, address, item_bytes, seconds)) for share in shares
        ]
        before, workers_before = cpu_s(control), sum(map(cpu_s, workers))
        for load in loads:
            assert load.stdin is not None
            load.stdin.write("go\n")
            load.stdin.flush()
        done = [Load(*json.loads(load.stdout.readline())) for load in loads if load.stdout is not None]
        control_s, workers_s = cpu_s(control) - before, sum(map(cpu_s, workers)) - workers_before
    requests = sum(load.requests for load in done)
    latencies = sorted(latency for load in done for latency in load.latencies_us)
    return Figures(
        requests_s=sum(load.requests / load.seconds for load in done),
        p50_us=latencies[len(latencies) // 2],
        p99_us=latencies[len(latencies) * 99 // 100],
        control_us=control_s / requests * 1e6,
        worker_us=workers_s / requests * 1e6 if workers else None,
    )


@contextlib.contextmanager
def load_process(
    readers: int, way: str, address: str, item_bytes: int, seconds: float
) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to begin."""
    arguments = [way, address, readers, item_bytes, seconds]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.control_load", *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def children_of(pid: int) -> list[int]:
    """Direct children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


if __name__ == "__main__":
    main()
