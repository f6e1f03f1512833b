"""What a worker costs for each request beside the tower: the stub tower, and nobody in front of the worker.

    python -m tests.bench.worker [--requests N]

This process plays control: it keeps so many small requests in flight on the worker's rings, and reclaims each
block when it is READY. cpu_us is the processor time of all the worker's threads for a request, switches how
often one of them went to sleep or was put aside, as the kernel counts. Requests have one item of one row.
"""

import argparse
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from shm.layout import Completion, CompletionKind, Submission, SubmissionKind
from shm.messages import ItemSource, RequestMetadata
from tests.bench.report import Report, Target
from tests.gpu_workers.harness import SLOT_COUNT, Harness

IN_FLIGHT: Final = (1, 8, 64)
ITEM: Final = b"stub rows=1 " + bytes(988)
CPU_LIMIT_US: Final = 80.0
HANG_GUARD_S: Final = 60.0


@dataclass(frozen=True)
class Usage:
    """What all threads of a process have used so far."""

    cpu_ns: int
    switches: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        """Now."""
        cpu_ns = switches = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            lines = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        return cls(cpu_ns, switches)


class Requests:
    """Requests that lie ready in the worker's arena, and the numbers of their tickets."""

    def __init__(self, worker: Harness) -> None:
        self._worker = worker
        self._tickets = count(1)
        metadata = msgspec.msgpack.encode(RequestMetadata("image", [ItemSource(64, len(ITEM))]))
        block = worker.arena.allocate(64 + len(ITEM))
        assert block is not None
        block.view[: len(metadata)] = metadata
        block.view[64:] = ITEM
        self._encode = Submission(
            SubmissionKind.ENCODE,
            deadline_ns=1 << 62,
            arena_offset=block.offset,
            arena_nbytes=block.nbytes,
            metadata_bytes=len(metadata),
            item_count=1,
        )

    def submit(self) -> None:
        """One more."""
        self._worker.say(self._encode._replace(ticket=next(self._tickets)))

    def run(self, in_flight: int, total: int) -> None:
        """Until `total` are READY, so many at any time."""
        for _ in range(in_flight):
            self.submit()
        submitted = in_flight
        for done, record in enumerate(self._ready_records(), start=1):
            self._worker.reclaim(record)
            if submitted < total:
                self.submit()
                submitted += 1
            if done == total:
                return

    def _ready_records(self) -> Iterator[Completion]:
        completions, bell = self._worker.control.completions, self._worker.control.eventfd
        while True:
            raw = completions.try_take()
            if raw is not None:
                record = Completion.unpack(raw)
                assert record.kind is not CompletionKind.FAILED, record
                if record.kind is CompletionKind.READY:
                    yield record
            elif completions.arm():
                assert select.select([bell], [], [], HANG_GUARD_S)[0], "no completion came"
                os.eventfd_read(bell)


def measure(in_flight: int, total: int) -> dict[str, float]:
    """A fresh worker's cost for a request."""
    with Harness(segment_bytes=64 << 20, max_batch_items=SLOT_COUNT // 4) as worker:
        requests = Requests(worker)
        requests.run(in_flight, max(in_flight, total // 10))
        before, begin_s = Usage.of(worker.process.pid), time.perf_counter()
        requests.run(in_flight, total)
        seconds, after = time.perf_counter() - begin_s, Usage.of(worker.process.pid)
    return {
        "requests_s": total / seconds,
        "cpu_us": (after.cpu_ns - before.cpu_ns) / total / 1000,
        "switches": (after.switches - before.switches) / total,
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.worker")
    parser.add_argument("--requests", type=int, default=10_000, help="of each measurement")
    total = parser.parse_args().requests
    report = Report("worker")
    for in_flight in IN_FLIGHT:
        figures = measure(in_flight, total)
        report.add_row(f"{in_flight} in flight", **figures)
    report.add_target(
        Target(f"CPU of a request at {in_flight} in flight, us", figures["cpu_us"], "<=", CPU_LIMIT_US)
    )
    report.finish()


if __name__ == "__main__":
    main()
