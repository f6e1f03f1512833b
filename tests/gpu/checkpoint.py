"""Checkpoints with random weights and the real towers' shapes, and what Hugging Face loads of them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from gpu_workers.checkpoints import qwen_vl
from gpu_workers.towers import load_towers
from tests.gpu.scale import TowerShape


def write_checkpoint(shape: TowerShape, directory: Path, device: torch.device) -> Path:
    """In float32. The weights are drawn on the device, where that takes no time."""
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    draft = getattr(qwen_vl, shape.recipe)(shape.size)
    for name, value in shape.vision.items():
        setattr(draft.config.vision_config, name, value)
    torch.manual_seed(0)
    with torch.device(device):
        model = draft.model_class(draft.config)
    model.cpu().save_pretrained(directory)
    draft.processor.save_pretrained(directory)
    return directory


def load_tower(shape: TowerShape, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The towers alone, as Hugging Face computes them."""
    classes = {
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }
    name = str(dtype).removeprefix("torch.")
    return load_towers(
        classes[shape.recipe], str(checkpoint), dtype=name, device=device, trust_remote_code=False
    )


def rows_of(output: Any) -> torch.Tensor:
    """(rows, dim) of get_image_features' output, DeepStack levels behind the main columns."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(level)) for level in levels], dim=-1)
