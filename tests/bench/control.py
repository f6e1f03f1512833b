"""What the control plane costs, with the stub tower: HTTP, sessions, and others.

    python -m tests.bench.control [--seconds N]

Every row is one closed-loop measurement: so many readers, in two processes, ask again as soon as they have
their answer; over HTTP each has its connection and its thread, over a session a process has all of its own
readers' encodes under way from one thread (tests.bench.control_load). What is compared is measured in turns,
ROUNDS times, and the best round counts: other work on a machine only ever makes a figure worse. control_us
and worker_us are CPU microseconds for each request, of all threads, as the kernel counts them.
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
WORKERS, READERS = (1, 2, 4, 8), (1, 64)
ROUNDS = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Over HTTP nobody attaches here: the clock ends the leases.
OPTIONS = ("--tower", "stub", "--segment-size", "64MiB", "--arena-size", "256MiB", "--lease-timeout", "1")
WAYS = ("http", "session")


@dataclass(frozen=True)
class Server:
    """Who is measured: its front process, and the workers behind it."""

    name: str
    address: str
    control: int
    workers: tuple[int, ...]

    @property
    def is_peer(self) -> bool:
        """Not ours."""
        return self.name not in WAYS


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
    with (
        peer("bare") as bare,
        peer("dispatcher") as dispatcher,
        Daemon("none", *OPTIONS, workers=1) as daemon,
    ):
        servers = [bare, dispatcher, http_of(daemon), session_of(daemon)]
        small = {server.name: figures for server, figures in compare(servers, SMALL_BYTES, seconds, report)}
        large = {server.name: figures for server, figures in compare(servers, LARGE_BYTES, seconds, report)}
        by_readers = {way: {16: small[way]} for way in WAYS}
        for readers in READERS:
            for server in servers[2:]:
                figures = measure(server, readers, SMALL_BYTES, seconds)
                by_readers[server.name][readers] = figures
                add_row(report, server.name, SMALL_BYTES, figures, 1, readers)
    by_workers = {way: {1: by_readers[way][16]} for way in WAYS}
    for workers in WORKERS[1:]:
        with Daemon("none", *OPTIONS, workers=workers) as daemon:
            for server in (http_of(daemon), session_of(daemon)):
                figures = measure(server, 16, SMALL_BYTES, seconds)
                by_workers[server.name][workers] = figures
                add_row(report, server.name, SMALL_BYTES, figures, workers, 16)
    add_http_targets(report, small, large)
    for way in WAYS:
        add_flat_target(report, way, "workers", by_workers[way])
        add_flat_target(report, way, "readers", by_readers[way])
    add_session_targets(report, small, large)
    report.finish()


def add_http_targets(report: Report, small: dict[str, Figures], large: dict[str, Figures]) -> None:
    """Our CPU on top of the bare application's."""
    for name, figures, percent in (("1 KB", small, 40), ("1.4 MB", large, 30)):
        on_top = (figures["http"].control_us / figures["bare"].control_us - 1) * 100
        report.add_target(
            Target(f"HTTP {name}: CPU on top of bare Hypercorn, percent", on_top, "<=", percent)
        )


def add_flat_target(report: Report, way: str, what: str, figures: dict[int, Figures]) -> None:
    """The cost with the most against the cost with one."""
    most = max(figures)
    grows = figures[most].control_us / figures[1].control_us
    report.add_target(Target(f"{way}: control's CPU with {most} {what} / with 1", grows, "<=", 1.2))


def add_session_targets(report: Report, small: dict[str, Figures], large: dict[str, Figures]) -> None:
    """Requests per second of the whole system, worker and readers included; beside it, control's CPU."""
    for name, figures, times in (("1 KB", small, 10), ("1 MB", large, 5)):
        ours, http, dispatcher = figures["session"], figures["http"], figures["dispatcher"]
        rate = ours.requests_s / http.requests_s
        report.add_target(Target(f"session {name}: requests/s against our HTTP", rate, ">=", times))
        cost = http.control_us / ours.control_us
        report.add_target(Target(f"session {name}: control's CPU against our HTTP's", cost, ">=", times))
        rate = ours.requests_s / dispatcher.requests_s
        report.add_target(Target(f"session {name}: requests/s against the dispatcher", rate, ">=", 5))


def http_of(daemon: Daemon) -> Server:
    """POST /encode over TCP."""
    return Server("http", f"127.0.0.1:{daemon.port}", daemon.process.pid, tuple(daemon.worker_pids()))


def session_of(daemon: Daemon) -> Server:
    """Session.encode."""
    return Server("session", daemon.attach_socket, daemon.process.pid, tuple(daemon.worker_pids()))


@contextlib.contextmanager
def peer(kind: str) -> Iterator[Server]:
    """Another server, on a port of its own."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.bench.control_peers", kind, str(port)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Server(kind, f"127.0.0.1:{port}", process.pid, tuple(children_of(process.pid)))
        finally:
            process.terminate()


def compare(
    servers: list[Server], item_bytes: int, seconds: float, report: Report
) -> list[tuple[Server, Figures]]:
    """Every server's best of ROUNDS turns, with 16 readers."""
    rounds = [[measure(server, 16, item_bytes, seconds) for server in servers] for _ in range(ROUNDS)]
    found = []
    for server, turns in zip(servers, zip(*rounds, strict=True), strict=True):
        figures = best(list(turns))
        add_row(report, server.name, item_bytes, figures, None if server.is_peer else 1, 16)
        found.append((server, figures))
    return found


def best(turns: list[Figures]) -> Figures:
    """Each column's best."""
    workers_us = [turn.worker_us for turn in turns if turn.worker_us is not None]
    return Figures(
        requests_s=max(turn.requests_s for turn in turns),
        p50_us=min(turn.p50_us for turn in turns),
        p99_us=min(turn.p99_us for turn in turns),
        control_us=min(turn.control_us for turn in turns),
        worker_us=min(workers_us, default=None),
    )


def add_row(
    report: Report, name: str, item_bytes: int, figures: Figures, workers: int | None, readers: int
) -> None:
    report.add_row(
        f"{name}, {item_bytes} bytes",
        workers=workers,
        readers=readers,
        requests_s=figures.requests_s,
        p50_us=figures.p50_us,
        p99_us=figures.p99_us,
        control_us=figures.control_us,
        worker_us=figures.worker_us,
    )
    print(json.dumps(report.rows[-1]), file=sys.stderr, flush=True)


def measure(server: Server, readers: int, item_bytes: int, seconds: float) -> Figures:
    """Readers in up to two processes, all begun together."""
    way = "session" if server.name == "session" else "http"
    shares = [share for share in (readers // 2, readers - readers // 2) if share]
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(load_process(share, way, server.address, item_bytes, seconds))
            for share in shares
        ]
        before, workers_before = cpu_s(server.control), sum(map(cpu_s, server.workers))
        for load in loads:
            assert load.stdin is not None
            load.stdin.write("go\n")
            load.stdin.flush()
        done = [Load(*json.loads(load.stdout.readline())) for load in loads if load.stdout is not None]
        control_s = cpu_s(server.control) - before
        workers_s = sum(map(cpu_s, server.workers)) - workers_before
    requests = sum(load.requests for load in done)
    latencies = sorted(latency for load in done for latency in load.latencies_us)
    return Figures(
        requests_s=sum(load.requests / load.seconds for load in done),
        p50_us=latencies[len(latencies) // 2],
        p99_us=latencies[len(latencies) * 99 // 100],
        control_us=control_s / requests * 1e6,
        worker_us=workers_s / requests * 1e6 if server.workers else None,
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
