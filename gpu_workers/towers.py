"""Loads a checkpoint's towers and projectors alone, by Hugging Face's own loader.

The model's class is subclassed on the fly: its __init__ builds the whole model on the meta device, which
costs nothing, and then drops the language model. What is not in the model is not read from the checkpoint, so
only the towers' weights are ever in memory, and everything from_pretrained knows (old key layouts, split
weights, non-persistent buffers) still works.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_workers.errors import ConfigurationError
from shm.layout import Dtype

_LANGUAGE_MODULES: Final = frozenset(
    ("language_model", "text_model", "lm_head", "talker", "code2wav", "token2wav", "code_predictor")
)
_CONTAINERS: Final = ("model", "thinker")  # modules that hold towers beside a language model
_OWN_CODE: Final = "transformers_modules."  # where transformers puts the code of checkpoints
# A "model" without any of these is a language model.
_TOWERS: Final = (
    "visual",
    "vision_tower",
    "vision_model",
    "audio_tower",
    "get_image_features",
    "get_audio_features",
)

_TORCH_DTYPES: Final = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
}


def load_towers(
    model_class: type[PreTrainedModel],
    checkpoint: str,
    *,
    dtype: str,
    device: torch.device,
    trust_remote_code: bool,
    config: PreTrainedConfig | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """The model without its language model, in eval mode, on `device`; its get_*_features methods work.

    dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16". config: of a part of the checkpoint,
    such as its thinker, where model_class is only that; None: the checkpoint's own. key_mapping: regular
    expressions for names of weights, and what the model calls them, before transformers' own renaming.

    ConfigurationError if the checkpoint lacks a weight of a tower; whatever from_pretrained raises for a
    damaged one.
    """
    part = {} if config is None else {"config": config}
    model, loading = _without_language_model(model_class).from_pretrained(
        checkpoint,
        **part,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        key_mapping=None if key_mapping is None else dict(key_mapping),
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ConfigurationError(
            f"the checkpoint lacks {len(missing)} weights of the tower, such as {missing[0]}"
        )
    model.requires_grad_(False)
    model = model.eval().to(device)
    if distributed.is_available() and distributed.is_initialized():
        from gpu_workers.shard import share_weights  # here, because it imports much that few workers need

        share_weights(model, device)
    return model


def tower_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def payload_dtype(dtype: torch.dtype) -> Dtype:
    """The payload's element type for rows of this torch type. ConfigurationError if it has none."""
    for known, candidate in _TORCH_DTYPES.items():
        if candidate == dtype:
            return known
    raise ConfigurationError(f"towers in {dtype} are not supported")


def _without_language_model(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    class TowersOnly(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _drop_language_model(self)
            if model_class.__module__.startswith(_OWN_CODE):
                _drop_token_embeddings(self, _token_embeddings(self))

        def tie_weights(self, *args: Any, **kwargs: Any) -> None:
            """Only the language model has tied weights."""

        @property
        def all_tied_weights_keys(self) -> dict[str, str]:
            return {}

        @all_tied_weights_keys.setter
        def all_tied_weights_keys(self, value: dict[str, str]) -> None:
            """The base class assigns what it found in the whole model."""

    # The loader looks up how to rename weights by the class's name.
    TowersOnly.__name__ = model_class.__name__
    TowersOnly.__qualname__ = model_class.__qualname__
    TowersOnly.__module__ = model_class.__module__
    return TowersOnly


def _drop_language_model(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if name in _LANGUAGE_MODULES or (name == "model" and not any(hasattr(child, one) for one in _TOWERS)):
            setattr(module, name, nn.Identity())
        elif name in _CONTAINERS:
            _drop_language_model(child)


def _token_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """What is left of them after the language model went by its name; None if nothing is."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # the language model that it would ask is dropped already
        return None
    return found if isinstance(found, nn.Embedding) else None


def _drop_token_embeddings(module: nn.Module, embeddings: nn.Module | None) -> None:
    """Drop the module that has them, under whatever name, if it has no tower beside them."""
    for name, child in list(module.named_children()):
        if embeddings is None or all(one is not embeddings for one in child.modules()):
            continue
        if any(hasattr(child, tower) for tower in _TOWERS):
            _drop_token_embeddings(child, embeddings)
        else:
            setattr(module, name, nn.Identity())
