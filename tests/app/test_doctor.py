"""app.doctor: the report, its verdicts and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config import EXIT_CONFIG
from app.doctor import Verdict, examine, run
from tests.app.serving import config

SMALL = config(checkpoint="", segment_bytes=1 << 20, arena_bytes=100 << 20)


def verdicts(**changes: object) -> dict[str, tuple[Verdict, str]]:
    settings = config(**{"checkpoint": "", "segment_bytes": 1 << 20, "arena_bytes": 100 << 20, **changes})
    return {finding.name: (finding.verdict, finding.text) for finding in examine(settings)}


def test_a_machine_that_can_serve_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert {"python", "options", "shared memory", "/dev/shm", "memlock", "cuda"} == {
        check["name"] for check in report["checks"]
    }


def test_too_little_memory_fails_and_names_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config(checkpoint="", segment_bytes=1 << 50), as_json=False) == EXIT_CONFIG
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert f"{((1 << 51) + (200 << 20)) >> 20} MiB wanted" in line
    assert "--segment-size" in line


def test_more_devices_than_there_are_fail() -> None:
    assert verdicts(device="cuda", base_gpu_id=100)["cuda"][0] is Verdict.FAILED


def test_every_rank_of_a_group_wants_a_device_of_its_own() -> None:
    wanted = verdicts(device="cuda", base_gpu_id=100, workers=3, tp_size=2, tp_mode="data")["cuda"]
    assert wanted[0] is Verdict.FAILED
    assert wanted[1].startswith("106 devices wanted")


def test_options_that_contradict_fail() -> None:
    assert verdicts(workers=0)["options"][0] is Verdict.FAILED


def test_a_checkpoint_needs_its_config_and_safetensors(tmp_path: Path) -> None:
    assert verdicts(checkpoint=str(tmp_path))["checkpoint"][0] is Verdict.FAILED
    (tmp_path / "config.json").write_text("{")
    assert "JSON" in verdicts(checkpoint=str(tmp_path))["checkpoint"][1]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert "safetensors" in verdicts(checkpoint=str(tmp_path))["checkpoint"][1]
    (tmp_path / "model.safetensors").touch()
    assert verdicts(checkpoint=str(tmp_path))["checkpoint"] == (Verdict.OK, "model_type qwen2_vl")
