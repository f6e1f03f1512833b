"""Recipes of the Qwen families for pictures and videos."""

from typing import Any, Final

import transformers
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer, text_config

_SPECIAL_TOKENS: Final = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_ROPE: Final = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_EXPERTS: Final = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_LINEAR_ATTENTION: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def qwen2_vl(size: Size) -> Draft:
    """Patches of 14; the merger's output is called hidden_size."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    vision = {
        "depth": size.depth,
        "embed_dim": size.hidden_size,
        "hidden_size": size.out_hidden_size,
        "mlp_ratio": size.intermediate_size // size.hidden_size,
        "num_heads": size.heads,
        "patch_size": 14,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text_config(size, rope_parameters=_ROPE), vision_config=vision, **_token_ids(tokenizer)
    )
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
    )
    return Draft(transformers.Qwen2VLForConditionalGeneration, config, processor)


def qwen2_5_vl(size: Size) -> Draft:
    """Window attention but for the last layer."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    config = transformers.Qwen2_5_VLConfig(
        text_config=text_config(size, rope_parameters=_ROPE),
        vision_config=windowed_vision(size),
        **_token_ids(tokenizer),
    )
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
    )
    return Draft(transformers.Qwen2_5_VLForConditionalGeneration, config, processor)


def qwen3_vl(size: Size) -> Draft:
    """Patches of 16, three DeepStack levels."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    config = transformers.Qwen3VLConfig(
        text_config=text_config(size, rope_parameters=_ROPE),
        vision_config=deepstack_vision(size),
        **_token_ids(tokenizer),
    )
    return Draft(transformers.Qwen3VLForConditionalGeneration, config, _qwen3_processor(tokenizer))


def qwen3_vl_moe(size: Size) -> Draft:
    """qwen3_vl before experts."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    config = transformers.Qwen3VLMoeConfig(
        text_config=text_config(size, rope_parameters=_ROPE, **_EXPERTS),
        vision_config=deepstack_vision(size),
        **_token_ids(tokenizer),
    )
    return Draft(transformers.Qwen3VLMoeForConditionalGeneration, config, _qwen3_processor(tokenizer))


def qwen3_5(size: Size) -> Draft:
    """No DeepStack; a language model with linear attention."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    config = transformers.Qwen3_5Config(
        text_config=text_config(size, **_LINEAR_ATTENTION),
        vision_config=_flat_vision(size),
        **_token_ids(tokenizer),
    )
    return Draft(transformers.Qwen3_5ForConditionalGeneration, config, _qwen3_processor(tokenizer))


def qwen3_5_moe(size: Size) -> Draft:
    """qwen3_5 before experts."""
    tokenizer = byte_tokenizer(_SPECIAL_TOKENS)
    experts = {**_EXPERTS, "shared_expert_intermediate_size": 32}
    config = transformers.Qwen3_5MoeConfig(
        text_config=text_config(size, **_LINEAR_ATTENTION, **experts),
        vision_config=_flat_vision(size),
        **_token_ids(tokenizer),
    )
    return Draft(transformers.Qwen3_5MoeForConditionalGeneration, config, _qwen3_processor(tokenizer))


def windowed_vision(size: Size) -> dict[str, Any]:
    """Qwen2.5's tower, which Omni has too."""
    return {
        "depth": size.depth,
        "hidden_size": size.hidden_size,
        "out_hidden_size": size.out_hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_heads": size.heads,
        "patch_size": 14,
        "fullatt_block_indexes": [size.depth - 1],
    }


def deepstack_vision(size: Size) -> dict[str, Any]:
    """Qwen3's tower, which Omni has too."""
    return {**_flat_vision(size), "deepstack_visual_indexes": [0, 1, 2]}


def _flat_vision(size: Size) -> dict[str, Any]:
    return {
        "depth": size.depth,
        "hidden_size": size.hidden_size,
        "out_hidden_size": size.out_hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_heads": size.heads,
        "patch_size": 16,
        "num_position_embeddings": 64,
    }


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _qwen3_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )
    return transformers.Qwen3VLProcessor(
        image_processor=image_processor,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        tokenizer=tokenizer,
    )
