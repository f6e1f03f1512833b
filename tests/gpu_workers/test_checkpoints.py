"""Small checkpoints: the same seed gives the same weights, and every file that a processor needs is there."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gpu_workers.checkpoints import RECIPES, make_checkpoint
from tests.gpu_workers.conftest import TinyCheckpoints

OWN_CODE = frozenset(("kimi_vl", "mimo_v2"))  # models that transformers does not have


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def make(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    make_checkpoint("qwen2_5_vl", directory, seed=seed)
    return weights(directory)


def test_weights_depend_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    first = make(tmp_path / "first", seed=3)
    torch.rand(7)  # somebody else's use of the generator
    again, other = make(tmp_path / "again", seed=3), make(tmp_path / "other", seed=4)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_making_a_checkpoint_leaves_the_callers_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    make(tmp_path, seed=9)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("family", sorted(RECIPES.keys() - OWN_CODE))
def test_a_tiny_checkpoint_is_whole(tiny_checkpoints: TinyCheckpoints, family: str) -> None:
    directory = tiny_checkpoints[family]
    config = json.loads((directory / "config.json").read_text())
    model_type = "llava" if family == "pixtral" else family  # LLaVA's class with another tower
    assert (config["model_type"], config["encoderd_seed"]) == (model_type, 11)
    assert transformers.AutoProcessor.from_pretrained(directory).tokenizer is not None
    assert sum(path.stat().st_size for path in directory.iterdir()) < 2_000_000
    assert all(weight.any() for weight in weights(directory).values() if weight.dim() > 1)


@pytest.mark.parametrize("family", sorted(OWN_CODE))
def test_a_tiny_checkpoint_brings_its_code(tiny_checkpoints: TinyCheckpoints, family: str) -> None:
    directory = tiny_checkpoints[family]
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config["encoderd_seed"]) == (family, 11)
    assert all((directory / f"{name.split('.')[0]}.py").exists() for name in config["auto_map"].values())
    assert sum(path.stat().st_size for path in directory.iterdir()) < 2_000_000


def test_the_command_line_makes_what_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["qwen2_vl", str(tmp_path), "--size", "tiny", "--seed", "5", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["checkpoints", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gpu_workers.checkpoints", run_name="__main__")
    assert ended.value.code == 0
    assert json.loads((tmp_path / "config.json").read_text())["encoderd_seed"] == 5
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.bfloat16}
