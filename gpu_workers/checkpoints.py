"""Makes small checkpoints with random weights: config, safetensors, processor and tokenizer files.

`encoderd make-checkpoint` runs this as `python -m gpu_workers.checkpoints FAMILY DIRECTORY`. The same family,
size, dtype and seed give the same weights; the seed stands in config.json as "encoderd_seed".
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

_SPECIAL_TOKENS: Final = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a checkpoint is: the transformer of the tower, and the language model behind it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    out_hidden_size: int
    language_layers: int = 2


SIZES: Final = {
    "tiny": Size(depth=4, hidden_size=32, intermediate_size=64, heads=2, out_hidden_size=64),
    # A forward of 224 x 224 takes some 30 ms on one core: worth measuring.
    "bench": Size(depth=4, hidden_size=192, intermediate_size=768, heads=4, out_hidden_size=384),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build one family: the model of a config, and its processor."""

    model_class: type[PreTrainedModel]
    config: Callable[[Size, dict[str, int]], Any]
    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin]


def make_checkpoint(
    family: str,
    directory: Path,
    size: str = "tiny",
    seed: int = 0,
    *,
    dtype: str = "float32",
    language_layers: int | None = None,
) -> None:
    """Write a checkpoint of `family` (a key of RECIPES) into directory, which is made if it is not there.

    size: a key of SIZES. language_layers: another depth of the language model, which encoderd never loads.
    """
    recipe = RECIPES[family]
    shape = SIZES[size]
    if language_layers is not None:
        shape = replace(shape, language_layers=language_layers)
    tokenizer = _byte_tokenizer()
    config = recipe.config(shape, _token_ids(tokenizer))
    config.encoderd_seed = seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.model_class(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    recipe.processor(tokenizer).save_pretrained(directory)


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gpu_workers.checkpoints")
    parser.add_argument("family", choices=sorted(RECIPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    make_checkpoint(options.family, options.directory, options.size, options.seed, dtype=options.dtype)
    return 0


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: enough for the processors that want a tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": list(_SPECIAL_TOKENS)})
    return fast


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _text_config(size: Size) -> dict[str, Any]:
    """A language model whose width is the tower's output width."""
    return {
        "vocab_size": 512,
        "hidden_size": size.out_hidden_size,
        "intermediate_size": 2 * size.out_hidden_size,
        "num_hidden_layers": size.language_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }


def _qwen2_vl_config(size: Size, token_ids: dict[str, int]) -> Any:
    vision = {
        "depth": size.depth,
        "embed_dim": size.hidden_size,
        "hidden_size": size.out_hidden_size,
        "mlp_ratio": size.intermediate_size // size.hidden_size,
        "num_heads": size.heads,
        "patch_size": 14,
    }
    return transformers.Qwen2VLConfig(text_config=_text_config(size), vision_config=vision, **token_ids)


def _qwen2_5_vl_config(size: Size, token_ids: dict[str, int]) -> Any:
    vision = {
        "depth": size.depth,
        "hidden_size": size.hidden_size,
        "out_hidden_size": size.out_hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_heads": size.heads,
        "patch_size": 14,
        "fullatt_block_indexes": [size.depth - 1],
    }
    return transformers.Qwen2_5_VLConfig(text_config=_text_config(size), vision_config=vision, **token_ids)


def _qwen3_vl_config(size: Size, token_ids: dict[str, int]) -> Any:
    vision = {
        "depth": size.depth,
        "hidden_size": size.hidden_size,
        "out_hidden_size": size.out_hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_heads": size.heads,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    return transformers.Qwen3VLConfig(text_config=_text_config(size), vision_config=vision, **token_ids)


def _qwen2_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
    )


def _qwen2_5_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
    )


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


RECIPES: Final = {
    "qwen2_vl": Recipe(transformers.Qwen2VLForConditionalGeneration, _qwen2_vl_config, _qwen2_processor),
    "qwen2_5_vl": Recipe(
        transformers.Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl_config, _qwen2_5_processor
    ),
    "qwen3_vl": Recipe(transformers.Qwen3VLForConditionalGeneration, _qwen3_vl_config, _qwen3_processor),
}

if __name__ == "__main__":
    sys.exit(main())
