"""Recipes of the Omni families: a thinker with three towers; the talker is left out."""

from typing import Any, Final

import transformers
from transformers import PreTrainedTokenizerFast

from gpu_workers.checkpoints.qwen_vl import deepstack_vision, windowed_vision
from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer, text_config

_TOKENS: Final = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_ROPE: Final = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_LONGEST_SOUND_SECONDS: Final = 300


def qwen2_5_omni(size: Size) -> Draft:
    """Qwen2.5's vision tower beside an audio tower."""
    tokenizer = byte_tokenizer(["<|im_start|>"], _TOKENS)
    thinker = {
        "text_config": text_config(size, rope_parameters=_ROPE),
        "vision_config": windowed_vision(size),
        "audio_config": {**_audio_config(size), "n_window": 100},
        **_token_ids(tokenizer, "{}_token_index"),
    }
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    processor = transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        feature_extractor=_feature_extractor(),
        tokenizer=tokenizer,
    )
    return Draft(transformers.Qwen2_5OmniForConditionalGeneration, config, processor)


def qwen3_omni_moe(size: Size) -> Draft:
    """Qwen3-VL's vision tower with DeepStack beside an audio tower of blocks."""
    tokenizer = byte_tokenizer(["<|im_start|>"], _TOKENS)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    audio = {**_audio_config(size), "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 16}
    thinker = {
        "text_config": text_config(size, rope_parameters=_ROPE, **experts),
        "vision_config": deepstack_vision(size),
        "audio_config": audio,
        **_token_ids(tokenizer, "{}_token_id"),
    }
    config = transformers.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    patches = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = transformers.Qwen3OmniMoeProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**patches),
        video_processor=transformers.Qwen2VLVideoProcessor(**patches),
        feature_extractor=_feature_extractor(),
        tokenizer=tokenizer,
    )
    return Draft(transformers.Qwen3OmniMoeForConditionalGeneration, config, processor)


def _audio_config(size: Size) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": size.heads,
        "encoder_ffn_dim": size.intermediate_size,
        "d_model": size.hidden_size,
        "output_dim": size.out_hidden_size,
    }


def _feature_extractor() -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=_LONGEST_SOUND_SECONDS)


def _token_ids(tokenizer: PreTrainedTokenizerFast, name: str) -> dict[str, int]:
    return {
        name.format(modality): tokenizer.convert_tokens_to_ids(_TOKENS[f"{modality}_token"])
        for modality in ("image", "video", "audio")
    }
