"""Qwen2.5-Omni and Qwen3-Omni: the thinker's three towers.

Only the thinker is loaded: the whole Qwen2.5-Omni class wants a file of voices. Qwen3-Omni's pictures have
DeepStack columns and its sound has none, so their rows differ in width.
"""

from typing import Final, NamedTuple

import torch
import transformers
from transformers import AutoConfig

from gpu_workers.families.composed import ComposedFamily, compose
from gpu_workers.families.ears import Qwen3OmniEar, Qwen25OmniEar
from gpu_workers.families.qwen_pictures import load_pictures
from gpu_workers.families.qwen_videos import AuxRule, load_videos, seconds_of_wanted_rate
from gpu_workers.families.speech import MakeEar, load_sounds
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig


class _Thinker(NamedTuple):
    class_name: str
    aux_rule: AuxRule
    make_ear: MakeEar


# By name: transformers imports a model's code when its class is asked for, seconds for each.
_THINKERS: Final = {
    "qwen2_5_omni": _Thinker(
        "Qwen2_5OmniThinkerForConditionalGeneration", seconds_of_wanted_rate(default_fps=2.0), Qwen25OmniEar
    ),
    "qwen3_omni_moe": _Thinker(
        "Qwen3OmniMoeThinkerForConditionalGeneration", seconds_of_wanted_rate(default_fps=1.0), Qwen3OmniEar
    ),
}


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's towers and processors. ConfigurationError for one that cannot work."""
    thinker = _THINKERS[model_type]
    whole = AutoConfig.from_pretrained(config.checkpoint, trust_remote_code=config.trust_remote_code)
    model = load_towers(
        getattr(transformers, thinker.class_name),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        config=whole.thinker_config,
    )
    return compose(
        model,
        model_type,
        {
            "image": lambda: load_pictures(config, model),
            "video": lambda: load_videos(config, model, thinker.aux_rule),
            "audio": lambda: load_sounds(config, model, thinker.make_ear),
        },
    )
