"""The control plane beside two busy workers: /livez latency, resident memory, time from start to /livez.

    python -m tests.bench.control_plane [--probes N] [--checkpoint DIR]

Starts a real daemon with two CPU workers and a real tower, keeps both encoding from another process, and
meanwhile asks /livez a hundred times a second over one kept connection. Resident memory is the control
process's own (RssAnon + RssFile); the shared-memory regions that it maps are listed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Report, Target
from tests.e2e.client import Http
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.pictures import picture_bytes

PROBE_INTERVAL_S = 0.01
LOAD_THREADS = 8


@dataclass(frozen=True)
class Figures:
    """What one run measured."""

    start_s: float
    probes_ms: list[float]
    private_mb: float
    shared_mb: float
    encodes_per_worker: list[int]

    def percentile(self, part: float) -> float:
        """Nearest rank, milliseconds."""
        ordered = sorted(self.probes_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.control_plane")
    parser.add_argument("--probes", type=int, default=2000)
    parser.add_argument("--checkpoint", help="directory; default: a fresh qwen2_vl checkpoint of size bench")
    parser.add_argument("--load", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        generate_load(Http(arguments.load))
        return
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory:
        checkpoint = arguments.checkpoint or make_checkpoint(Path(directory) / "qwen2_vl")
        figures = measure(str(checkpoint), arguments.probes)
    report(figures)


def make_checkpoint(directory: Path) -> Path:
    """In a process of its own, so that this one never loads torch."""
    command = [sys.executable, "-m", "gpu_workers.checkpoints", "qwen2_vl", str(directory)]
    subprocess.run([*command, "--size", "bench", "--seed", "0"], cwd=REPOSITORY, check=True)
    return directory


def measure(checkpoint: str, probe_count: int) -> Figures:
    """One daemon's life."""
    daemon = Daemon(checkpoint, "--dtype", "float32", "--segment-size", "256MiB", workers=2)
    start_s = time_to_livez(daemon)
    with daemon, load(daemon) as generator:
        wait_for_both_workers(daemon)
        probes_ms = probe(daemon, probe_count)
        resident = daemon.resident_bytes()
        encodes, _ = generator.communicate()
    return Figures(
        start_s=start_s,
        probes_ms=probes_ms,
        private_mb=(resident["RssAnon"] + resident["RssFile"]) / 1e6,
        shared_mb=resident["RssShmem"] / 1e6,
        encodes_per_worker=[int(word) for word in encodes.split()],
    )


def time_to_livez(daemon: Daemon) -> float:
    """Seconds from the start of the process to the first 200 of /livez."""
    with contextlib.closing(select.epoll()) as pace:
        while True:
            with contextlib.suppress(OSError):
                if daemon.tcp.get("/livez").status == 200:
                    return (time.monotonic_ns() - daemon.started_ns) / 1e9
            assert daemon.process.poll() is None, daemon.tail()
            pace.poll(0.002)  # two cores: this loop must not take one of them from the daemon


@contextlib.contextmanager
def load(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps LOAD_THREADS requests in flight until its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.control_plane", "--load", daemon.http.address],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def generate_load(http: Http) -> None:
    """The load process: pictures, one after the other from each thread; prints how many each worker
    encoded."""
    stop = threading.Event()
    pictures = [picture_bytes(448, 448, seed) for seed in range(4)]
    counts = [0, 0]
    lock = threading.Lock()

    def keep_posting(thread: int) -> None:
        for number in itertools.count(thread):
            if stop.is_set():
                return
            answer = http.encode(pictures[number % len(pictures)])
            if answer.status == 200:
                http.release(answer.handle)
                with lock:
                    counts[answer.handle.segment] += 1

    threads = [threading.Thread(target=keep_posting, args=(number,)) for number in range(LOAD_THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(*counts)


def wait_for_both_workers(daemon: Daemon) -> None:
    """Until both have work in flight."""
    while not all(worker["in_flight"] for worker in daemon.http.workers()):
        assert daemon.process.poll() is None


def probe(daemon: Daemon, count: int) -> list[float]:
    """Milliseconds of each GET /livez, PROBE_INTERVAL_S apart, on one kept connection."""
    connection: http.client.HTTPConnection = daemon.tcp.connection()
    results = []
    next_s = time.monotonic()
    try:
        for _ in range(count):
            time.sleep(max(0.0, next_s - time.monotonic()))
            next_s += PROBE_INTERVAL_S
            begin_ns = time.perf_counter_ns()
            connection.request("GET", "/livez")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            results.append((time.perf_counter_ns() - begin_ns) / 1e6)
    finally:
        connection.close()
    return results


def report(figures: Figures) -> None:
    """Print the figures beside their limits."""
    p99_ms = figures.percentile(0.99)
    paper = Report("control_plane")
    paper.add_row(
        "/livez while both workers encode",
        probes=len(figures.probes_ms),
        p50_ms=figures.percentile(0.5),
        p99_ms=p99_ms,
        max_ms=max(figures.probes_ms),
    )
    paper.add_row(
        "control process", start_s=figures.start_s, own_mb=figures.private_mb, regions_mb=figures.shared_mb
    )
    for worker, count in enumerate(figures.encodes_per_worker):
        paper.add_row(f"worker {worker}", pictures=count)
    paper.add_target(Target("/livez p99, ms", p99_ms, "<=", 20))
    paper.add_target(Target("control process, its own memory, MB", figures.private_mb, "<=", 60))
    paper.add_target(Target("start to /livez, s", figures.start_s, "<=", 1))
    paper.finish()


if __name__ == "__main__":
    main()
