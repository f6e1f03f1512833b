"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures and videos.

The reference is the model's own get_image_features and get_video_features on what its processors make of the
same decoded pixels. Qwen3-VL's DeepStack levels follow the main embedding on the last dimension of each row,
so its rows are out_hidden_size * (1 + levels) wide.
"""

from typing import Final

import torch
import transformers

from gpu_workers.families.composed import ComposedFamily, compose
from gpu_workers.families.qwen_pictures import load_pictures
from gpu_workers.families.qwen_videos import (
    AuxRule,
    load_videos,
    no_aux,
    seconds_of_sampled_rate,
    timestamps,
)
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig

# By name: transformers imports a model's code when its class is asked for, seconds for each.
_MODELS: Final[dict[str, tuple[str, AuxRule]]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", no_aux),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", seconds_of_sampled_rate),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", timestamps),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", timestamps),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", timestamps),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", timestamps),
}


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's tower and processors. ConfigurationError for one that cannot work."""
    class_name, aux_rule = _MODELS[model_type]
    model = load_towers(
        getattr(transformers, class_name),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    return compose(
        model,
        model_type,
        {
            "image": lambda: load_pictures(config, model),
            "video": lambda: load_videos(config, model, aux_rule),
        },
    )
