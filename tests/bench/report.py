"""What every benchmark prints: a table for people, and one line of JSON, the last, for machines.

    report = Report("ring")
    report.add_row("our ring", p50_us=0.9, p99_us=1.6)
    report.add_target(Target("times faster than pyzmq", 87.1, ">=", 50))
    report.finish()

The JSON: {"bench", "commit", "machine", "results": [row, ...], "targets": [{"name", "value", "op", "target",
"reached"}, ...]}. A missed target is reported, not raised: a benchmark that ran has exit code 0.
"""

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parents[2]
PLOTS = REPOSITORY / "docs" / "plots"


@dataclass(frozen=True)
class Target:
    """A value that was measured and what it should be."""

    name: str
    value: float
    op: Literal[">=", "<="]
    target: float

    @property
    def reached(self) -> bool:
        """Whether the value is as good as the target or better."""
        return self.value >= self.target if self.op == ">=" else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        """The target's part of the JSON line."""
        return {
            "name": self.name,
            "value": _rounded(self.value),
            "op": self.op,
            "target": self.target,
            "reached": self.reached,
        }


class Report:
    """The rows and targets of one benchmark run."""

    def __init__(self, bench: str) -> None:
        self.bench = bench
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []

    def add_row(self, name: str, **columns: float | int | str | None) -> None:
        """One line of the table. Columns carry their unit in the name (p50_us); None where not measured."""
        self.rows.append({"name": name, **columns})

    def add_target(self, target: Target) -> None:
        """One promise, measured."""
        self.targets.append(target)

    def plot_path(self) -> Path:
        """Where the benchmark's plot belongs: docs/plots/BENCH.png."""
        PLOTS.mkdir(parents=True, exist_ok=True)
        return PLOTS / f"{self.bench}.png"

    def table(self) -> str:
        """Rows and targets, aligned."""
        columns = ["name"]
        for row in self.rows:
            columns += [column for column in row if column not in columns]
        lines = _aligned([columns, *([_cell(row.get(column)) for column in columns] for row in self.rows)])
        for target in self.targets:
            verdict = "reached" if target.reached else "MISSED"
            lines.append(f"{verdict}: {target.name}: {_cell(target.value)} {target.op} {target.target:g}")
        return "\n".join(lines)

    def json_line(self) -> str:
        """The whole report in one line."""
        return json.dumps(
            {
                "bench": self.bench,
                "commit": _commit(),
                "machine": _machine(),
                "results": [{key: _rounded(value) for key, value in row.items()} for row in self.rows],
                "targets": [target.as_json() for target in self.targets],
            }
        )

    def finish(self) -> None:
        """Print the table, and the JSON line last."""
        print(self.table())
        print(self.json_line(), flush=True)


def _rounded(value: Any) -> Any:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _aligned(table: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _commit() -> str:
    """The commit that is checked out, with + when files differ from it; unknown outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
