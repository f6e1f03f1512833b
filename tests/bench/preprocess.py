"""python -m tests.bench.preprocess: encoded media to what the towers take, beside Hugging Face's processors.

Each contest has two sides that make the same tensor of the same bytes; that they are equal is checked first.
A round gives both sides their turn, the order changing from round to round; a figure is the median over the
rounds, a ratio is taken inside a round, then its median, so that a neighbour who takes a core for a while
spoils one round and not one side. "One core": one thread, bound to it. "Two": two preprocess threads, as the
worker runs them. torch has one thread of its own in both.
"""

import argparse
import io
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from gpu_workers.media.image import ImageReader
from gpu_workers.media.pixels import Pixels, open_pixels
from tests.bench.contests import Contest, sound_contests, video_contests
from tests.bench.report import Report, Target

_OURS, _THEIRS = "#1b6ca8", "#b8bec4"
_TURN_SECONDS: Final = 0.4  # of the slower side: short enough for both to meet the same neighbours
_MAX_PIXELS: Final = 33_500_000

PICTURES: Final = {"224": (224, 224), "640x480": (480, 640), "1080p": (1080, 1920), "4K": (2160, 3840)}
TARGET_PICTURE: Final = "1080p"
# What the published checkpoints' preprocessor_config.json say.
PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "Qwen2.5-VL": {"min_pixels": 3136, "max_pixels": 12_845_056},
    "Qwen3-VL": {
        "patch_size": 16,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


class Turn(NamedTuple):
    """One side in one round."""

    units_per_s: float
    cpu_ms_per_unit: float


class Round(NamedTuple):
    """Both sides in one round."""

    theirs: Turn
    ours: Turn

    def times(self) -> float:
        """How many times as fast ours is."""
        return self.ours.units_per_s / self.theirs.units_per_s


def main() -> None:
    """Run the contests, print the report, draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.preprocess", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    report = Report("preprocess")
    for contest in chain(picture_contests(), video_contests(), sound_contests()):
        contest.check()
        for thread_count in (1, 2):
            print(f"{contest.name}, {_cores(thread_count)}", flush=True)
            _add(report, contest, thread_count, _race(contest, thread_count, rounds))
    _plot(report)
    report.finish()


# --- pictures ---


def picture_contests() -> Iterator[Contest]:
    """Every picture with every processor."""
    for family, options in PROCESSORS.items():
        processor = transformers.Qwen2VLImageProcessor(**options)
        pixels = open_pixels(processor, dtype=torch.float32, device=torch.device("cpu"))
        reader = ImageReader(_MAX_PIXELS, "white")
        for size, (height, width) in PICTURES.items():
            data = _jpeg(height, width)
            yield Contest(
                name=f"{family} {size}",
                unit="picture",
                amount=1,
                theirs=partial(_by_hugging_face, processor, data),
                ours=partial(_by_us, processor, pixels, reader, data),
                target=2 if size == TARGET_PICTURE else None,
            )


def _jpeg(height: int, width: int) -> bytes:
    """Soft shapes with some grain, as large as a photograph's file: 1080p is about half a megabyte."""
    random = np.random.default_rng(height)
    shapes = random.integers(0, 256, (math.ceil(height / 24), math.ceil(width / 24), 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC))
    grain = random.normal(0, 4, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _by_hugging_face(processor: Any, data: bytes) -> torch.Tensor:
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    values: torch.Tensor = processor(images=[picture], return_tensors="pt")["pixel_values"]
    return values


def _by_us(processor: Any, pixels: Pixels, reader: ImageReader, data: bytes) -> torch.Tensor:
    """What the worker does with a picture, its look at the header included."""
    size = reader.size(memoryview(data))
    height, width = smart_resize(
        size.height,
        size.width,
        factor=processor.patch_size * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    return pixels.pixel_values(reader.rgb(memoryview(data))[None], height, width)


# --- the race ---


def _race(contest: Contest, thread_count: int, rounds: int) -> list[Round]:
    with _bound_to(thread_count), ThreadPoolExecutor(thread_count) as threads:
        once = contest.amount / _turn(threads, contest, contest.theirs, thread_count).units_per_s
        calls = thread_count * max(1, round(_TURN_SECONDS / once / thread_count))
        return [_round(threads, contest, calls, number) for number in range(rounds)]


def _round(threads: ThreadPoolExecutor, contest: Contest, calls: int, number: int) -> Round:
    if number % 2:
        ours = _turn(threads, contest, contest.ours, calls)
        return Round(_turn(threads, contest, contest.theirs, calls), ours)
    theirs = _turn(threads, contest, contest.theirs, calls)
    return Round(theirs, _turn(threads, contest, contest.ours, calls))


def _turn(
    threads: ThreadPoolExecutor, contest: Contest, side: Callable[[], torch.Tensor], calls: int
) -> Turn:
    def call(_: int) -> None:
        side()  # and drop the tensor: the worker keeps few at a time

    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in threads.map(call, range(calls)):
        pass
    units = calls * contest.amount
    cpu_seconds = time.process_time() - cpu_started
    return Turn(units / (time.perf_counter() - started), cpu_seconds / units * 1e3)


@contextmanager
def _bound_to(core_count: int) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, on that many cores, where there are so many."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:core_count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


# --- the report ---


def _add(report: Report, contest: Contest, thread_count: int, rounds: list[Round]) -> None:
    times = statistics.median(one.times() for one in rounds)
    report.add_row(
        f"{contest.name}, {_cores(thread_count)}",
        unit=contest.unit,
        hugging_face_per_s=statistics.median(one.theirs.units_per_s for one in rounds),
        ours_per_s=statistics.median(one.ours.units_per_s for one in rounds),
        times_as_fast=times,
        hugging_face_cpu_ms=statistics.median(one.theirs.cpu_ms_per_unit for one in rounds),
        ours_cpu_ms=statistics.median(one.ours.cpu_ms_per_unit for one in rounds),
    )
    if contest.target is not None and thread_count == 1:
        report.add_target(Target(f"times as fast: {contest.name}, one core", times, ">=", contest.target))


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _plot(report: Report) -> None:
    """Two bars for each contest on one core, first contest on top, logarithmic."""
    import matplotlib.pyplot as plt

    rows = [row for row in report.rows if row["name"].endswith(_cores(1))][::-1]
    places = np.arange(len(rows))
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.4), layout="constrained")
    for column, shift, colour, label in (
        ("ours_per_s", 0.2, _OURS, "encoderd"),
        ("hugging_face_per_s", -0.2, _THEIRS, "Pillow, PyAV or soundfile, and Hugging Face's processor"),
    ):
        rates = [row[column] for row in rows]
        bars = axes.barh(places + shift, rates, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=3, fontsize=9)
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel(
        "pictures, sampled frames or seconds of sound per second, one core: encoded bytes to equal tensors"
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e6e9", zorder=0)
    axes.set_axisbelow(True)
    figure.savefig(report.plot_path(), dpi=150)
    plt.close(figure)


def _label(row: dict[str, Any]) -> str:
    return f"{row['name'].removesuffix(', ' + _cores(1))}, {row['times_as_fast']:.2g} ×"


if __name__ == "__main__":
    main()
