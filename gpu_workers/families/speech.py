"""Families that take sound alone: Qwen2-Audio, Qwen3-ASR and GLM-ASR."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
import transformers
from transformers import AutoFeatureExtractor, FeatureExtractionMixin, PreTrainedModel

from gpu_workers.errors import ConfigurationError
from gpu_workers.families.composed import ComposedFamily, compose
from gpu_workers.families.ears import GlmAsrEar, Qwen2AudioEar, Qwen3AsrEar
from gpu_workers.families.sound import Ear, Sounds, choose_rate
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig

# What a call of the feature extractor may be told, and what these ears tell it: nothing is cut, padding is
# no sound, and the mask says so.
_FIXED: Final[dict[str, tuple[Any, ...]]] = {
    "truncation": (False,),
    "padding": (True, "longest", "max_length"),
    "return_attention_mask": (True,),
}

MakeEar: TypeAlias = Callable[[PreTrainedModel, Any], Ear]

# By name: transformers imports a model's code when its class is asked for, seconds for each.
_MODELS: Final[dict[str, tuple[str, MakeEar]]] = {
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", Qwen2AudioEar),
    "qwen3_asr": ("Qwen3ASRForConditionalGeneration", Qwen3AsrEar),
    "glmasr": ("GlmAsrForConditionalGeneration", GlmAsrEar),
}


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's tower and feature extractor. ConfigurationError for one that cannot work."""
    class_name, make_ear = _MODELS[model_type]
    model = load_towers(
        getattr(transformers, class_name),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    return compose(model, model_type, {"audio": lambda: load_sounds(config, model, make_ear)})


def load_sounds(config: WorkerConfig, model: PreTrainedModel, make_ear: MakeEar) -> Sounds:
    """The checkpoint's sound. OSError or ValueError if it has no feature extractor."""
    options = config.media_options.audio
    _check_call_options(options)
    taken = {"sampling_rate", *_FIXED}
    others = {name: value for name, value in options.items() if name not in taken}
    check_has_extractor(config.checkpoint)
    extractor = AutoFeatureExtractor.from_pretrained(
        config.checkpoint, trust_remote_code=config.trust_remote_code, **others
    )
    rate = choose_rate(options, extractor, model.config.audio_config)
    return Sounds(make_ear(model, extractor), rate)


def _check_call_options(options: Mapping[str, Any]) -> None:
    """ConfigurationError for what these ears do in one way only, so that no option is ignored silently."""
    for name, allowed in _FIXED.items():
        if name in options and options[name] not in allowed:
            known = " or ".join(repr(value) for value in allowed)
            raise ConfigurationError(
                f"--mm-process-config audio: {name} {options[name]!r} is not supported, only {known}"
            )


def check_has_extractor(checkpoint: str) -> None:
    """OSError or ValueError without one: from an image processor's file AutoFeatureExtractor would make one
    with values of its own."""
    described, _ = FeatureExtractionMixin.get_feature_extractor_dict(checkpoint)
    if "feature_extractor_type" not in described:
        raise ValueError("no file names a feature extractor")
