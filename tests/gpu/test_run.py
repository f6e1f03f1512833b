"""run.sh without a CUDA device: the rehearsal of every step, and the refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RUN = Path(__file__).with_name("run.sh")


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([str(RUN), *arguments], env=environment, capture_output=True, text=True)


def test_the_rehearsal_runs_every_step_and_every_check_holds(tmp_path: Path) -> None:
    finished = _run("--cpu-rehearsal", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows: dict[str, dict[str, Any]] = {}
    for line in (tmp_path / "gpu.jsonl").read_text().splitlines()[:-1]:
        row = json.loads(line)
        rows[row["name"]] = row
    for mapping in ("posix, worker", "memfd, worker"):
        assert rows[f"{mapping}: device to segment"]["pageable_gb_per_s"] > 0
    for mapping in ("posix, reader", "memfd, reader"):
        assert rows[f"{mapping}: segment to device"]["pageable_gb_per_s"] > 0
    assert rows["forwards with copy-out"]["beside_s"] > 0
    for tower in ("tiny Qwen2.5-VL", "tiny Qwen3-VL"):
        assert rows[f"{tower}, 224x224: pixel values"]["levels_apart"] == 0
        assert rows[f"{tower}, float32: from float64"]["worker"] < 1e-5
        assert rows[f"{tower}, mixed"]["images_per_s"] > 0
    assert rows["tiny Qwen3-VL, bfloat16: from float64"]["worker"] < 0.1
    assert (tmp_path / "gpu.png").stat().st_size > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_exits_77() -> None:
    finished = _run()
    assert finished.returncode == 77
    assert "no CUDA device" in finished.stdout
