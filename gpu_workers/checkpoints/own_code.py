"""Recipes of models whose code is not in transformers: it goes into the checkpoint, see stand_ins."""

from typing import Any, Final

import transformers

from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer
from gpu_workers.checkpoints.stand_ins.configuration_kimi_vl import KimiVLConfig
from gpu_workers.checkpoints.stand_ins.configuration_mimo_v2 import MiMoV2Config
from gpu_workers.checkpoints.stand_ins.image_processing_kimi_vl import KimiVLImageProcessor
from gpu_workers.checkpoints.stand_ins.modeling_kimi_vl import KimiVLForConditionalGeneration
from gpu_workers.checkpoints.stand_ins.modeling_mimo_v2 import MiMoV2ForCausalLM

_PATCH_SIZE: Final = 14


def mimo_v2(size: Size) -> Draft:
    """Pictures, videos with their sound, and sound at 24 kHz; the model brings its own preprocessing."""
    transformer = {"hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size}
    config = MiMoV2Config(
        hidden_size=size.out_hidden_size,
        num_hidden_layers=size.language_layers,
        vision_config={
            **transformer,
            "depth": size.depth,
            "num_heads": size.heads,
            "patch_size": _PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        audio_config={**transformer, "num_heads": size.heads, "n_mels": 128, "group_size": 4},
        processor_config={"audio_sampling_rate": 24_000},
    )
    return _draft(MiMoV2ForCausalLM, "AutoModelForCausalLM", config, byte_tokenizer([]))


def kimi_vl(size: Size) -> Draft:
    """MoonViT on pictures; the image processor is the checkpoint's own too."""
    config = KimiVLConfig(
        vision_config={
            "model_type": "moonvit",
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.heads,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "patch_size": _PATCH_SIZE,
            "merge_kernel_size": [2, 2],
        },
        text_config={
            "vocab_size": 512,
            "hidden_size": size.out_hidden_size,
            "num_hidden_layers": size.language_layers,
        },
    )
    KimiVLImageProcessor.register_for_auto_class("AutoImageProcessor")
    processor = KimiVLImageProcessor(patch_size=_PATCH_SIZE)
    return _draft(KimiVLForConditionalGeneration, "AutoModelForCausalLM", config, processor)


def _draft(model_class: Any, auto_class: str, config: transformers.PreTrainedConfig, processor: Any) -> Draft:
    """save_pretrained copies the code of registered classes into the checkpoint."""
    type(config).register_for_auto_class()
    model_class.register_for_auto_class(auto_class)
    return Draft(model_class, config, processor)
