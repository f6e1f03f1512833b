"""Hand-off of an embedding to another process: attach a handle, against the same bytes through pyzmq.

`python -m tests.bench.handoff`. Ours: from the handle in hand to the read-only tensor (or array) in hand, in
a process whose mappings were prefaulted at connect; reading its first and last element afterwards is timed
too, because a page that is not mapped would show there. pyzmq: PUSH/PULL over ipc, from the request to the
tensor: copy=False on both ends, torch.frombuffer, clone (the frame's memory is zmq's). Both in the same
run, sizes interleaved; the payload lies ready in the producer's memory.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import zmq

from shm.client import Session, connect
from shm.messages import Handle
from shm.view import View
from tests.bench.attach_process import AttachServer
from tests.bench.attach_server import Ready
from tests.bench.report import Report, Target

MIB: Final = 1 << 20
SIZES_MIB: Final = (1, 4, 16, 64, 256)
DIM: Final = 4096
ATTACHES: Final = 200
WARM_UP: Final = 20
TRANSFERS: Final = 7
SEGMENT_BYTES: Final = 512 * MIB


class Sample(NamedTuple):
    """One size's timings, in seconds. read_s: first and last element of the tensor, once it is in hand."""

    size_mib: int
    torch_s: list[float]
    read_s: list[float]
    numpy_s: list[float]
    zmq_s: list[float]


def main() -> None:
    """Measure, print the table and the JSON line, draw the plot."""
    samples = [Sample(size_mib, [], [], [], []) for size_mib in SIZES_MIB]
    with tempfile.TemporaryDirectory() as directory:
        measure_attaches(Path(directory), samples)
        measure_pyzmq(Path(directory), samples)
    report = Report("handoff")
    for sample in samples:
        add_row(report, sample)
    add_targets(report, samples)
    plot(report, samples)
    report.finish()


def measure_attaches(directory: Path, samples: list[Sample]) -> None:
    """Fill torch_s and numpy_s. The producer and the daemon's part are another process."""
    with (
        AttachServer(str(directory / "attach.sock"), SEGMENT_BYTES) as server,
        connect(server.path) as session,
    ):
        handles = [server.grant(ready_block(server, sample), 2 * (WARM_UP + ATTACHES)) for sample in samples]
        for attempt in range(WARM_UP + ATTACHES):
            for sample, waiting in zip(samples, handles, strict=True):
                torch_s, read_s = attach_timed(session, waiting.pop(), View.torch)
                numpy_s, _ = attach_timed(session, waiting.pop(), View.numpy)
                if attempt >= WARM_UP:
                    sample.torch_s.append(torch_s)
                    sample.read_s.append(read_s)
                    sample.numpy_s.append(numpy_s)


def ready_block(server: AttachServer, sample: Sample) -> Handle:
    """A READY bfloat16 block of this size in the server's segment."""
    handle = server.fill(rows=sample.size_mib * MIB // (2 * DIM), dim=DIM, dtype="bfloat16")
    server.tell(Ready(handle), str)
    return handle


def attach_timed(session: Session, handle: Handle, rows_of: Callable[[View], Any]) -> tuple[float, float]:
    """Seconds from the handle to the rows in hand, and from there until two elements were read."""
    start = time.perf_counter()
    view = session.attach(handle)
    rows = rows_of(view)
    in_hand = time.perf_counter()
    rows[0, 0].item(), rows[-1, -1].item()
    read = time.perf_counter()
    view.release()
    return in_hand - start, read - in_hand


def measure_pyzmq(directory: Path, samples: list[Sample]) -> None:
    """Fill zmq_s: ask the other process for so many bytes, receive them, have a tensor of one's own."""
    ask_address, data_address = f"ipc://{directory}/ask", f"ipc://{directory}/data"
    sender = multiprocessing.get_context("spawn").Process(target=send, args=(ask_address, data_address))
    sender.start()
    with ExitStack() as undo:
        undo.callback(sender.join)
        context = undo.enter_context(zmq.Context())
        ask = undo.enter_context(context.socket(zmq.PUSH))
        ask.connect(ask_address)
        undo.callback(ask.send, b"")
        data = undo.enter_context(context.socket(zmq.PULL))
        data.bind(data_address)
        for attempt in range(1 + TRANSFERS):
            for index, sample in enumerate(samples):
                elapsed = receive_timed(ask, data, index)
                if attempt:
                    sample.zmq_s.append(elapsed)


def receive_timed(ask: zmq.Socket[bytes], data: zmq.Socket[bytes], index: int) -> float:
    """Seconds from the request to the tensor in hand."""
    start = time.perf_counter()
    ask.send(bytes([index]))
    frame = data.recv(copy=False)
    torch.frombuffer(frame.buffer, dtype=torch.bfloat16).clone().view(-1, DIM)
    return time.perf_counter() - start


def send(ask_address: str, data_address: str) -> None:
    """The other process: answers each index with that size's bytes, an empty message ends it."""
    payloads = [bytearray(size_mib * MIB) for size_mib in SIZES_MIB]
    with zmq.Context() as context, context.socket(zmq.PULL) as ask, context.socket(zmq.PUSH) as data:
        ask.bind(ask_address)
        data.connect(data_address)
        while request := ask.recv():
            data.send(payloads[request[0]], copy=False)


def percentile_99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def add_row(report: Report, sample: Sample) -> None:
    """One size's line."""
    shm_s, zmq_s = statistics.median(sample.torch_s), statistics.median(sample.zmq_s)
    report.add_row(
        f"{sample.size_mib} MiB",
        shm_torch_p50_us=shm_s * 1e6,
        shm_torch_p99_us=percentile_99(sample.torch_s) * 1e6,
        shm_read_p50_us=statistics.median(sample.read_s) * 1e6,
        shm_numpy_p50_us=statistics.median(sample.numpy_s) * 1e6,
        shm_numpy_p99_us=percentile_99(sample.numpy_s) * 1e6,
        zmq_p50_us=zmq_s * 1e6,
        zmq_max_us=max(sample.zmq_s) * 1e6,
        times_faster=zmq_s / shm_s,
    )


def add_targets(report: Report, samples: list[Sample]) -> None:
    """The three promises."""
    shm_us = {sample.size_mib: statistics.median(sample.torch_s) * 1e6 for sample in samples}
    zmq_us = {sample.size_mib: statistics.median(sample.zmq_s) * 1e6 for sample in samples}
    report.add_target(Target("slowest median over all sizes, us", max(shm_us.values()), "<=", 150))
    report.add_target(Target("256 MiB over 1 MiB", shm_us[256] / shm_us[1], "<=", 2))
    report.add_target(Target("times faster than pyzmq at 64 MiB", zmq_us[64] / shm_us[64], ">=", 300))


def plot(report: Report, samples: list[Sample]) -> None:
    """Median time over size, both axes logarithmic."""
    import matplotlib.pyplot as plt  # here, so that the sender does not load it

    sizes = [sample.size_mib for sample in samples]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    series = {
        "pyzmq ipc, copy=False, clone": [statistics.median(sample.zmq_s) for sample in samples],
        "attach, torch": [statistics.median(sample.torch_s) for sample in samples],
        "attach, numpy": [statistics.median(sample.numpy_s) for sample in samples],
    }
    for label, seconds in series.items():
        axes.loglog(sizes, [second * 1e6 for second in seconds], marker="o", label=label)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("embedding, MiB")
    axes.set_ylabel("median time to a usable tensor, µs")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(report.plot_path(), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
