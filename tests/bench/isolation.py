"""What one bad picture costs the 31 good ones that come with it. Part of tests.bench.batching.

Waves of 32 requests at once, of the daemon with the larger small checkpoint: 31 good pictures, and one more
that is as good as they are, or broken (its header is right, its data end early). Good and bad waves in turns;
processor time of the worker and of the control plane, and wall time, of all bad waves against all good ones.

A picture that breaks the forward itself cannot be made from outside. So the encoder that isolates it is
measured alone, in the worst case: a batch of 32 whose forward raises at its very end while the culprit is in.
"""

import time
from dataclasses import dataclass, field

from tests.bench.report import Report, Target
from tests.bench.traffic import Traffic, body_of
from tests.bench.worker import Usage
from tests.e2e.daemon import Daemon
from tests.e2e.pictures import picture_bytes

CONCURRENCY, SIDE_PIXELS = 32, 56
EXTRA_LIMIT_PERCENT = 10.0
WAVES = 12


@dataclass
class Cost:
    """What some waves took, together."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    statuses: list[int] = field(default_factory=list)


async def bad_among_good(daemon: Daemon) -> tuple[Cost, Cost]:
    """Waves of good pictures alone, and waves with one broken one."""
    good = [body_of(picture_bytes(SIDE_PIXELS, SIDE_PIXELS, seed)) for seed in range(CONCURRENCY)]
    broken = body_of(picture_bytes(SIDE_PIXELS, SIDE_PIXELS, CONCURRENCY)[:-200])
    bodies = {"good": good, "bad": [*good[: CONCURRENCY // 2], broken, *good[CONCURRENCY // 2 + 1 :]]}
    costs = {"good": Cost(), "bad": Cost()}
    traffic = Traffic(daemon.http_socket)
    try:
        await traffic.closed_loop(good, CONCURRENCY, CONCURRENCY)
        for _ in range(WAVES):
            for kind, cost in costs.items():
                before_ns, begin_s = _cpu_ns(daemon), time.perf_counter()
                outcomes = await traffic.closed_loop(bodies[kind], CONCURRENCY, CONCURRENCY)
                cost.wall_s += time.perf_counter() - begin_s
                cost.cpu_s += (_cpu_ns(daemon) - before_ns) / 1e9
                cost.statuses += [outcome.status for outcome in outcomes]
    finally:
        traffic.close()
    assert set(costs["good"].statuses) == {200}
    assert sorted(costs["bad"].statuses) == [200] * (WAVES * (CONCURRENCY - 1)) + [422] * WAVES
    return costs["good"], costs["bad"]


def _cpu_ns(daemon: Daemon) -> int:
    return sum(Usage.of(pid).cpu_ns for pid in (daemon.process.pid, *daemon.worker_pids()))


def forwarded_again(checkpoint: str) -> float:
    """Processor time of a batch with a culprit over that of a batch without; in a process of its own."""
    import torch

    from gpu_workers.families.base import MediaItem, Prepared, Rows
    from gpu_workers.families.registry import load_on
    from gpu_workers.faults import Faults
    from gpu_workers.isolation import Encoder
    from gpu_workers.jobs import Item, Job
    from gpu_workers.ranks import Alone
    from gpu_workers.torch_device import CpuDevice
    from tests.gpu_workers.harness import worker_config

    torch.set_num_threads(1)
    family = load_on(worker_config(checkpoint=checkpoint, tower="auto", dtype="float32"), torch.device("cpu"))
    job = Job(ticket=1, deadline_ns=0, modality="image")
    for seed in range(CONCURRENCY):
        media = MediaItem("image", (memoryview(picture_bytes(SIDE_PIXELS, SIDE_PIXELS, seed)),))
        plan = family.inspect(media)
        assert plan is not None, "a picture's header tells its size"
        job.add_item(media, plan)
        job.items[-1].prepared = family.preprocess(media, plan)
    forward, culprit = family.forward, job.items[CONCURRENCY // 2].prepared

    def fail_at_the_end(batch: list[Prepared]) -> list[Rows]:
        rows = forward(batch)
        if any(prepared is culprit for prepared in batch):
            raise ValueError("culprit")
        return rows

    def cpu_s(items: list[Item]) -> float:
        encoder = Encoder(family, CpuDevice(), Faults([]), Alone(family))
        begin_s = time.process_time()
        encoder.encode(items)
        return time.process_time() - begin_s

    with torch.inference_mode():
        alone_s = min(cpu_s(job.items) for _ in range(4))
        family.forward = fail_at_the_end  # type: ignore[method-assign]
        return min(cpu_s(job.items) for _ in range(4)) / alone_s


def add_isolation(report: Report, good: Cost, bad: Cost, forwarded: float) -> None:
    """The waves side by side, the promise about them, and the worst case of a forward."""
    for name, cost in ((f"{CONCURRENCY} good", good), (f"{CONCURRENCY - 1} good, 1 broken", bad)):
        report.add_row(
            f"{name}, at once", cpu_ms=cost.cpu_s / WAVES * 1000, all_rows_ms=cost.wall_s / WAVES * 1000
        )
    report.add_row(
        f"batch of {CONCURRENCY} that one item breaks at its end, against a good one", times=forwarded
    )
    extra_percent = (bad.cpu_s / good.cpu_s - 1) * 100
    report.add_target(
        Target(
            "CPU that a broken picture adds to 31 good ones, percent",
            extra_percent,
            "<=",
            EXTRA_LIMIT_PERCENT,
        )
    )
