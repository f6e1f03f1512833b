"""python -m tests.gpu.main [--cpu-rehearsal] [--output DIR]: every step, one table, exit status.

0: all checks hold (targets that were missed are in the table). 1: a check failed. 77: there is no CUDA
device. Writes gpu.png and gpu.jsonl (one line for each row, then the report's) into DIR. run.sh starts it.
"""

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.bench.report import Report, Target
from tests.gpu import hidden, numbers, pinned, preprocess, throughput
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.driver import Driver
from tests.gpu.scale import THUMBNAIL, Scale, TowerShape, cuda_scale, rehearsal_scale

logger = logging.getLogger(__name__)

_NO_CUDA = 77
_OURS, _PLAIN, _BARE = "#1b6ca8", "#dfc9a4", "#b8bec4"


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny towers on the CPU")
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR")
    options = parser.parse_args()
    if not options.cpu_rehearsal and not torch.cuda.is_available():
        print("tests/gpu: torch finds no CUDA device here (--cpu-rehearsal runs every step without one)")
        return _NO_CUDA
    scale = rehearsal_scale() if options.cpu_rehearsal else cuda_scale(len(os.sched_getaffinity(0)))
    if options.cpu_rehearsal:
        torch.set_num_threads(1)
    session = Session(scale)
    with tempfile.TemporaryDirectory(prefix="encoderd-gpu-") as directory:
        session.run(Path(directory))
    session.write(options.output)
    for failure in session.failures:
        print(f"FAILED: {failure}")
    return 1 if session.failures else 0


class Session:
    """Runs the steps; a check that fails is noted and the other steps go on."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._speeds: dict[str, list[throughput.Throughput]] = {}
        self.report = Report("gpu" if scale.device != "cpu" else "gpu-rehearsal")
        self.failures: list[str] = []

    def run(self, directory: Path) -> None:
        """All steps."""
        with self._step("pinned segments"):
            self._pinned()
        with self._step("copies behind forwards"):
            self._hidden()
        pictures = throughput.picture_sets(self._scale)
        for shape in self._scale.towers:
            with self._step(shape.name):
                checkpoint = write_checkpoint(shape, directory / shape.recipe, self._scale.torch_device)
                with self._step(f"{shape.name}, preprocessing"):
                    self._preprocess(shape, checkpoint)
                self._encode(shape, checkpoint, pictures)

    def write(self, directory: Path) -> None:
        """The table on standard output, the files in directory."""
        directory.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"bench": self.report.bench, **row}) for row in self.report.rows]
        (directory / "gpu.jsonl").write_text("\n".join([*lines, self.report.json_line(), ""]))
        self._plot(directory / "gpu.png")
        self.report.finish()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever a step raises, the others are still worth their device time
            logger.exception("%s", name)
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)

    def _pinned(self) -> None:
        for copies in pinned.measure(self._scale):
            self.report.add_row(
                f"{copies.mapping}: {copies.direction}",
                pageable_gb_per_s=copies.pageable_gb_per_s,
                pinned_gb_per_s=None if math.isnan(copies.pinned_gb_per_s) else copies.pinned_gb_per_s,
                register_status=copies.status,
            )
            if copies.status is not None:
                name = f"cudaHostRegister status, {copies.mapping}"
                self.report.add_target(Target(name, copies.status, "<=", 0))
            if copies.status == 0:
                ratio = copies.pinned_gb_per_s / copies.pageable_gb_per_s
                self.report.add_target(Target(f"pinned to pageable, {copies.mapping}", ratio, ">=", 1.5))

    def _hidden(self) -> None:
        found = hidden.measure(self._scale)
        self.report.add_row(
            "forwards with copy-out",
            alone_s=found.alone_seconds,
            beside_s=found.beside_seconds,
            between_s=found.between_seconds,
        )
        if self._scale.device != "cpu":
            self.report.add_target(Target("copy-out hidden, share", found.hidden_share, ">=", 0.8))

    def _preprocess(self, shape: TowerShape, checkpoint: Path) -> None:
        for found in preprocess.measure(self._scale, checkpoint):
            self.report.add_row(
                f"{shape.name}, {found.picture}: pixel values",
                one_core_per_s=found.on_host_per_s,
                device_per_s=found.on_device_per_s,
                levels_apart=found.largest_difference_levels,
            )

    def _encode(self, shape: TowerShape, checkpoint: Path, pictures: dict[str, list[bytes]]) -> None:
        """Numbers in the tower's types, and speed with the worker of the type that is for speed."""
        reference = numbers.Reference(shape, checkpoint, self._scale)
        for dtype in shape.dtypes:
            with Driver(self._scale, checkpoint, dtype) as driver:
                self._numbers(shape, reference, driver, dtype)
                if self._scale.dtype is dtype:
                    self._speed(shape, checkpoint, pictures, driver)

    def _numbers(
        self, shape: TowerShape, reference: numbers.Reference, driver: Driver, dtype: torch.dtype
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        with self._step(f"{shape.name}, numbers in {name}"):
            found = reference.compare(driver, dtype)
            self.report.add_row(
                f"{shape.name}, {name}: from float64", worker=found.worker, bare_tower=found.hugging_face
            )
            found.check(dtype, shape.name)

    def _speed(
        self, shape: TowerShape, checkpoint: Path, pictures: dict[str, list[bytes]], driver: Driver
    ) -> None:
        rivals = throughput.Rivals(shape, checkpoint, self._scale)
        for name, files in pictures.items():
            with self._step(f"{shape.name}, {name}"):
                found = throughput.measure(driver, rivals, name, files, self._scale)
                self._speeds.setdefault(shape.name, []).append(found)
                self._add_speed(shape, found)

    def _add_speed(self, shape: TowerShape, found: throughput.Throughput) -> None:
        run = found.run
        self.report.add_row(
            f"{shape.name}, {found.picture}",
            images_per_s=run.images_per_s,
            plain_loop_per_s=found.plain_per_s,
            bare_tower_per_s=found.bare_per_s,
            bare_batch=found.bare_batch_items,
            batch=run.mean_batch_items,
            forward_share=run.forward_seconds / run.seconds,
            copy_share=run.copy_seconds / run.seconds,
            device_busy_share=found.busy_share,
        )
        if self._scale.device != "cpu":
            what = f"{shape.name}, {found.picture}: images/s, times the"
            self.report.add_target(
                Target(f"{what} plain loop's", run.images_per_s / found.plain_per_s, ">=", 1)
            )
            least = 0.8 if found.picture == THUMBNAIL else 0.9
            self.report.add_target(
                Target(f"{what} bare tower's", run.images_per_s / found.bare_per_s, ">=", least)
            )

    def _plot(self, path: Path) -> None:
        """Images/s of the three, one panel for each tower."""
        import matplotlib.pyplot as plt

        if not self._speeds:
            return
        figure, panels = plt.subplots(
            1, len(self._speeds), figsize=(10, 3.2), layout="constrained", squeeze=False
        )
        for axes, (tower, found) in zip(panels[0], self._speeds.items(), strict=True):
            series = (
                ("bare tower", _BARE, [one.bare_per_s for one in found]),
                ("encoderd", _OURS, [one.run.images_per_s for one in found]),
                ("plain loop", _PLAIN, [one.plain_per_s for one in found]),
            )
            for place, (label, colour, rates) in enumerate(series):
                places = [index + (place - 1) * 0.27 for index in range(len(found))]
                bars = axes.bar(places, rates, 0.25, color=colour, label=label)
                axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=2, fontsize=7)
            axes.set_xticks(range(len(found)), [one.picture for one in found])
            axes.set_yscale("log")
            axes.set_title(f"{tower}, images/s", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0][0].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
