"""Recipes of the families that take pictures as squares of one size: LLaVA's, Gemma 3, InternVL."""

from typing import Any, Final

import transformers

from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer, text_config

_SIDE_PIXELS: Final = 56
_SQUARE: Final = {"height": _SIDE_PIXELS, "width": _SIDE_PIXELS}
_PINPOINTS: Final = [[56, 56], [56, 112], [112, 56], [112, 112]]
_GEMMA_TOKENS: Final = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
_INTERNVL_TOKENS: Final = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def llava(size: Size) -> Draft:
    """CLIP without its class token."""
    tokenizer = byte_tokenizer(["<image>"])
    config = transformers.LlavaConfig(
        text_config=text_config(size, model_type="llama"),
        vision_config=_clip(size),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": _SIDE_PIXELS}, crop_size=_SQUARE
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    return Draft(transformers.LlavaForConditionalGeneration, config, processor)


def llava_next(size: Size) -> Draft:
    """CLIP on tiles, each line of them ended by a newline."""
    tokenizer = byte_tokenizer(["<image>"])
    config = transformers.LlavaNextConfig(
        text_config=text_config(size, model_type="llama"),
        vision_config=_clip(size),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={"shortest_edge": _SIDE_PIXELS}, crop_size=_SQUARE, image_grid_pinpoints=_PINPOINTS
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    return Draft(transformers.LlavaNextForConditionalGeneration, config, processor)


def llava_onevision(size: Size) -> Draft:
    """SigLIP on tiles; frames of videos pooled."""
    tokenizer = byte_tokenizer(["<image>", "<video>"])
    config = transformers.LlavaOnevisionConfig(
        text_config=text_config(size, model_type="qwen2"),
        vision_config=_siglip(size),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=_SQUARE, image_grid_pinpoints=_PINPOINTS
        ),
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=_SQUARE),
        tokenizer=tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    return Draft(transformers.LlavaOnevisionForConditionalGeneration, config, processor)


def gemma3(size: Size) -> Draft:
    """SigLIP pooled to a fixed number of rows."""
    tokenizer = byte_tokenizer([], _GEMMA_TOKENS)
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(_GEMMA_TOKENS["image_token"])
    config = transformers.Gemma3Config(
        text_config=text_config(size),
        vision_config=_siglip(size),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.convert_tokens_to_ids(_GEMMA_TOKENS["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(_GEMMA_TOKENS["eoi_token"]),
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(
            size=_SQUARE, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    return Draft(transformers.Gemma3ForConditionalGeneration, config, processor)


def internvl(size: Size) -> Draft:
    """Tiles and a thumbnail, or the frames of a video."""
    tokenizer = byte_tokenizer([], _INTERNVL_TOKENS)
    for name in ("start_image_token", "end_image_token", "context_image_token"):
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(_INTERNVL_TOKENS[name]))
    config = transformers.InternVLConfig(
        text_config=text_config(size, model_type="qwen2"),
        vision_config={
            **_transformer(size),
            "image_size": [_SIDE_PIXELS] * 2,
            "patch_size": [14, 14],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True),
        video_processor=transformers.InternVLVideoProcessor(size=_SQUARE),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    return Draft(transformers.InternVLForConditionalGeneration, config, processor)


def _clip(size: Size) -> dict[str, Any]:
    return {**_square_tower(size), "model_type": "clip_vision_model", "projection_dim": size.hidden_size}


def _siglip(size: Size) -> dict[str, Any]:
    return {**_square_tower(size), "model_type": "siglip_vision_model", "vision_use_head": False}


def _square_tower(size: Size) -> dict[str, Any]:
    return {**_transformer(size), "image_size": _SIDE_PIXELS, "patch_size": 14}


def _transformer(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
    }
