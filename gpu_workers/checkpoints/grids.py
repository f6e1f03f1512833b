"""Recipes of the families that take pictures at their own size: Pixtral's, GLM-4V's, Kimi K2.5."""

from typing import Any, Final

import transformers
from transformers import PreTrainedTokenizerFast

from gpu_workers.checkpoints.recipe import Draft, Recipe, Size, byte_tokenizer, text_config

_ROPE: Final = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_GLM_NAMES: Final = {"image_token": "<|image|>", "video_token": "<|video|>"}
_GLM_IDS: Final = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_GLM_EXPERTS: Final = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_KIMI_NAMES: Final = {
    "image_token": "<|media_pad|>",
    "video_token": "<|kimi_k25_video_placeholder|>",
}
_KIMI_LANGUAGE: Final = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def mistral3(size: Size) -> Draft:
    """Pixtral's tower before a merge of 2 x 2."""
    tokenizer, processor = _pixtral_processor(merge=2)
    config = transformers.Mistral3Config(
        text_config=text_config(size, model_type="mistral"),
        vision_config=_pixtral(size),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    return Draft(transformers.Mistral3ForConditionalGeneration, config, processor)


def pixtral(size: Size) -> Draft:
    """Pixtral's tower in LLaVA's class."""
    tokenizer, processor = _pixtral_processor(merge=1)
    config = transformers.LlavaConfig(
        text_config=text_config(size, model_type="mistral"),
        vision_config=_pixtral(size),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return Draft(transformers.LlavaForConditionalGeneration, config, processor)


def _glm(name: str, processor_name: str, **language: Any) -> Recipe:
    """name, processor_name: as transformers' classes begin."""

    def recipe(size: Size) -> Draft:
        tokenizer = byte_tokenizer(
            ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"], _GLM_NAMES
        )
        vision = {
            "depth": size.depth,
            "hidden_size": size.hidden_size,
            "out_hidden_size": size.out_hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_heads": size.heads,
            "patch_size": 14,
            "image_size": 112,
        }
        config = _class(f"{name}Config")(
            text_config=text_config(size, rope_parameters=_ROPE, **language),
            vision_config=vision,
            **{key: tokenizer.convert_tokens_to_ids(token) for key, token in _GLM_IDS.items()},
        )
        processor = _class(f"{processor_name}Processor")(
            image_processor=_class(f"{processor_name}ImageProcessor")(),
            video_processor=_class(f"{processor_name}VideoProcessor")(),
            tokenizer=tokenizer,
        )
        return Draft(_class(f"{name}ForConditionalGeneration"), config, processor)

    return recipe


glm4v: Final = _glm("Glm4v", "Glm4v")
glm4v_moe: Final = _glm("Glm4vMoe", "Glm4v", **_GLM_EXPERTS)
glm46v: Final = _glm("Glm46V", "Glm46V", model_type="glm4v_text")
glm_ocr: Final = _glm("GlmOcr", "Glm46V")


def kimi_k25(size: Size) -> Draft:
    """MoonViT; videos in chunks of four frames, each pooled over time."""
    tokenizer = byte_tokenizer(["<|media_start|>", "<|media_end|>", "<|media_content|>"], _KIMI_NAMES)
    language = text_config(size, **_KIMI_LANGUAGE)
    del language["head_dim"]
    config = transformers.Kimi_K25Config(
        text_config=language,
        vision_config={
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.heads,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "patch_size": 14,
        },
        projection_hidden_size=size.hidden_size,
        image_token_id=tokenizer.convert_tokens_to_ids(_KIMI_NAMES["image_token"]),
        video_token_id=tokenizer.convert_tokens_to_ids(_KIMI_NAMES["video_token"]),
    )
    processor = transformers.Kimi_K25Processor(
        image_processor=transformers.Kimi_K25ImageProcessor(),
        video_processor=transformers.Kimi_K25VideoProcessor(),
        tokenizer=tokenizer,
    )
    return Draft(transformers.Kimi_K25ForConditionalGeneration, config, processor)


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _pixtral(size: Size) -> dict[str, Any]:
    return {
        "model_type": "pixtral",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "head_dim": size.hidden_size // size.heads,
        "image_size": 112,
        "patch_size": 14,
    }


def _pixtral_processor(merge: int) -> tuple[PreTrainedTokenizerFast, transformers.PixtralProcessor]:
    tokenizer = byte_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={"longest_edge": 112}, patch_size={"height": 14 * merge, "width": 14 * merge}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=merge,
    )
    return tokenizer, processor
