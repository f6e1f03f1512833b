"""Writes small checkpoints: config, safetensors, processor and tokenizer files.

The same family, size, dtype and seed give the same weights; the seed stands in config.json as
"encoderd_seed".
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

import torch

from gpu_workers.checkpoints.recipe import SIZES, Recipe

_HERE: Final = "gpu_workers.checkpoints"
# model_type -> "module:function". By name: transformers imports a model's code when its class is asked for.
RECIPES: Final = {
    "qwen2_vl": f"{_HERE}.qwen_vl:qwen2_vl",
    "qwen2_5_vl": f"{_HERE}.qwen_vl:qwen2_5_vl",
    "qwen3_vl": f"{_HERE}.qwen_vl:qwen3_vl",
    "qwen3_vl_moe": f"{_HERE}.qwen_vl:qwen3_vl_moe",
    "qwen3_5": f"{_HERE}.qwen_vl:qwen3_5",
    "qwen3_5_moe": f"{_HERE}.qwen_vl:qwen3_5_moe",
    "qwen2_5_omni": f"{_HERE}.qwen_omni:qwen2_5_omni",
    "qwen3_omni_moe": f"{_HERE}.qwen_omni:qwen3_omni_moe",
    "qwen2_audio": f"{_HERE}.speech:qwen2_audio",
    "qwen3_asr": f"{_HERE}.speech:qwen3_asr",
    "glmasr": f"{_HERE}.speech:glmasr",
    "gemma3n": f"{_HERE}.gemma3n:gemma3n",
    "llava": f"{_HERE}.tiles:llava",
    "llava_next": f"{_HERE}.tiles:llava_next",
    "llava_onevision": f"{_HERE}.tiles:llava_onevision",
    "gemma3": f"{_HERE}.tiles:gemma3",
    "internvl": f"{_HERE}.tiles:internvl",
    "mistral3": f"{_HERE}.grids:mistral3",
    "pixtral": f"{_HERE}.grids:pixtral",
    "glm4v": f"{_HERE}.grids:glm4v",
    "glm4v_moe": f"{_HERE}.grids:glm4v_moe",
    "glm46v": f"{_HERE}.grids:glm46v",
    "glm_ocr": f"{_HERE}.grids:glm_ocr",
    "kimi_k25": f"{_HERE}.grids:kimi_k25",
    "kimi_vl": f"{_HERE}.own_code:kimi_vl",
    "mimo_v2": f"{_HERE}.own_code:mimo_v2",
}


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
    shape = SIZES[size]
    if language_layers is not None:
        shape = replace(shape, language_layers=language_layers)
    draft = _recipe(family)(shape)
    draft.config.encoderd_seed = seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = draft.model_class(draft.config)
        _draw_zeros(model)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    draft.processor.save_pretrained(directory)


def _draw_zeros(model: torch.nn.Module) -> None:
    """Draw the matrices that classes start at zero: Gemma 3's projection would make all rows zeros, which
    are right whatever came before it."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)


def _recipe(family: str) -> Recipe:
    module, function = RECIPES[family].split(":")
    recipe: Recipe = getattr(import_module(module), function)
    return recipe
