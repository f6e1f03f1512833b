"""Configuration of the model in modeling_kimi_vl.py."""

from typing import Any

from transformers import PreTrainedConfig


class KimiVLConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sections are plain dicts."""

    model_type = "kimi_vl"

    vision_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None
    media_placeholder_token_id: int = 300
