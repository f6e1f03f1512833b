"""Loading the towers alone: nothing of the language model in memory, nothing of the tower missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpu_workers.checkpoints import make_checkpoint
from gpu_workers.errors import ConfigurationError
from gpu_workers.towers import load_towers, payload_dtype, tower_bytes
from shm.layout import Dtype
from tests.gpu_workers.conftest import FAMILIES, TinyCheckpoints

MODEL_CLASSES = {
    "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
}

# Loads a worker's family of each checkpoint in turn and encodes a picture with it. Prints the process's peak
# bytes after each.
MEASURE = """
import gc, resource, sys
import torch
from gpu_workers.families import qwen_vl
from gpu_workers.loading import _warm_up
from tests.gpu_workers.harness import worker_config

for checkpoint in sys.argv[1:]:
    config = worker_config(checkpoint=checkpoint, tower="auto")
    family = qwen_vl.load(config, torch.device("cpu"), "qwen2_5_vl")
    _warm_up(family)
    del family
    gc.collect()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def load(checkpoint: Path, family: str, dtype: str = "auto") -> transformers.PreTrainedModel:
    return load_towers(
        MODEL_CLASSES[family],
        str(checkpoint),
        dtype=dtype,
        device=torch.device("cpu"),
        trust_remote_code=False,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_tower_has_weights(tiny_checkpoints: TinyCheckpoints, family: str) -> None:
    model = load(tiny_checkpoints[family], family)
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert all(name.startswith("model.visual.") for name in names)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not model.training


@pytest.mark.parametrize("family", FAMILIES)
def test_the_towers_weights_are_those_of_the_whole_model(
    tiny_checkpoints: TinyCheckpoints, family: str
) -> None:
    tower = load(tiny_checkpoints[family], family)
    whole = dict(MODEL_CLASSES[family].from_pretrained(tiny_checkpoints[family]).named_parameters())
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, whole[name])


def test_a_checkpoint_without_a_weight_of_the_tower_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoints["qwen3_vl"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    removed = next(name for name in weights if "visual.blocks.0" in name)
    del weights[removed]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lacks 1 .* such as model\.visual\.blocks\.0"):
        load(tmp_path, "qwen3_vl")


def test_the_type_is_the_checkpoints_or_the_one_asked_for(tmp_path: Path) -> None:
    make_checkpoint("qwen2_5_vl", tmp_path, dtype="bfloat16")
    assert payload_dtype(load(tmp_path, "qwen2_5_vl").dtype) is Dtype.BFLOAT16
    assert payload_dtype(load(tmp_path, "qwen2_5_vl", "float16").dtype) is Dtype.FLOAT16


def test_a_type_that_no_payload_has_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="float64"):
        payload_dtype(torch.float64)


def test_the_language_models_weights_are_never_in_memory(tmp_path: Path) -> None:
    """The same tower twice; the second language model is more than ten times as large as the tower."""
    make_checkpoint("qwen2_5_vl", tmp_path / "small", "bench", language_layers=1)
    make_checkpoint("qwen2_5_vl", tmp_path / "large", "bench", language_layers=40)
    tower = tower_bytes(load(tmp_path / "small", "qwen2_5_vl"))
    small, large = (_weights_bytes(tmp_path / name) for name in ("small", "large"))
    assert large - tower > 10 * tower
    small_peak, large_peak = _peak_bytes(tmp_path / "small", tmp_path / "large")
    assert large_peak - small_peak < tower / 2 < (large - small) / 10


def _weights_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def _peak_bytes(*checkpoints: Path) -> list[int]:
    """Of one process that loads them one after the other: its peak after each, so never less than before."""
    command = [sys.executable, "-c", MEASURE, *map(str, checkpoints)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in ended.stdout.split()]
