"""Configuration of the model in modeling_mimo_v2.py."""

from typing import Any

from transformers import PreTrainedConfig


class MiMoV2Config(PreTrainedConfig):  # type: ignore[misc]
    """Sections are plain dicts, as in the real model's config.json."""

    model_type = "mimo_v2"

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 2
    vision_config: dict[str, Any] | None = None
    audio_config: dict[str, Any] | None = None
    processor_config: dict[str, Any] | None = None
