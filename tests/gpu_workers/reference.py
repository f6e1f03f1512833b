"""Whole Hugging Face models, to compare with, and small media to compare on."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch
import transformers
from PIL import Image

from gpu_workers.families.base import Family, ItemPlan, MediaItem
from gpu_workers.families.registry import load_on
from shm.messages import MediaOptions
from tests.gpu_workers.harness import worker_config

THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
SPEECH_MODELS = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
}


# What Hugging Face's processors say to their feature extractors.
AUDIO_KWARGS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"padding": "max_length"},
    "qwen2_5_omni": {"padding": "max_length"},
    "qwen3_omni_moe": {"padding": True, "truncation": False},
    "qwen3_asr": {"padding": True, "truncation": False, "n_window": 50},
    "glmasr": {},
}


def audio_inputs(processor: Any, family: str, samples: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Of one sound, by the processor's own audio half: tensors and num_audio_tokens."""
    inputs, _ = processor._process_audio(
        [samples],
        sampling_rate=16_000,
        return_attention_mask=True,
        return_tensors="pt",
        **AUDIO_KWARGS[family],
    )
    return dict(inputs)


def processed_sound(checkpoint: Path, family: str, samples: int) -> dict[str, torch.Tensor]:
    """What the checkpoint's processor gives for noise of this length: features and mask by its own names."""
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    inputs = audio_inputs(processor, family, noise(samples))
    wanted = ("input_features", "feature_attention_mask", "input_features_mask")
    return {name: inputs[name].contiguous() for name in wanted if name in inputs}


def load_family(checkpoint: Path, dtype: str = "auto", **options: dict[str, Any]) -> Family:
    """A family on the CPU. options: of --mm-process-config, by modality.

    With one thread from now on, as in a worker: their number decides how sums are split.
    """
    torch.set_num_threads(1)
    config = worker_config(
        checkpoint=str(checkpoint), tower="auto", dtype=dtype, media_options=MediaOptions(**options)
    )
    return load_on(config, torch.device("cpu"))


@cache
def whole_model(checkpoint: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with its language model; the thinker of an Omni checkpoint. Loaded once for all files."""
    if family in THINKERS:
        config = transformers.AutoConfig.from_pretrained(checkpoint).thinker_config
        model_class = getattr(transformers, THINKERS[family])
        return model_class.from_pretrained(checkpoint, config=config, dtype=dtype)
    if family in SPEECH_MODELS:
        return getattr(transformers, SPEECH_MODELS[family]).from_pretrained(checkpoint, dtype=dtype)
    return transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)


def rows_of_vision(output: Any) -> torch.Tensor:
    """Rows of all grids of get_image_features or get_video_features, DeepStack levels behind them."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(level)) for level in levels], dim=-1)


def plan_of(family: Family, item: MediaItem) -> ItemPlan:
    """As intake and the preprocess threads find it."""
    return family.inspect(item) or family.measure(item)


def encode(family: Family, *items: MediaItem) -> list[torch.Tensor]:
    """Rows of each item; all that may share a forward do."""
    plans = [plan_of(family, item) for item in items]
    prepared = [family.preprocess(item, plan) for item, plan in zip(items, plans, strict=True)]
    rows_of: dict[int, torch.Tensor] = {}
    for key in {one.batch_key for one in prepared}:
        places = [place for place, one in enumerate(prepared) if one.batch_key == key]
        for place, tensor in zip(places, family.forward([prepared[place] for place in places]), strict=True):
            rows_of[place] = torch.as_tensor(tensor).clone()
    rows = [rows_of[place] for place in range(len(items))]
    dim = family.info().dim_of(items[0].modality)
    assert [tuple(tensor.shape) for tensor in rows] == [(plan.rows, dim) for plan in plans]
    return rows


def assert_as_close(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """Our largest and our mean error are at most 1.25 times Hugging Face's (equal on most machines)."""
    our_error, their_error = (ours.double() - truth).abs(), (theirs.double() - truth).abs()
    assert our_error.max() <= 1.25 * their_error.max()
    assert our_error.mean() <= 1.25 * their_error.mean()


def picture(height: int, width: int) -> Image.Image:
    """Noise, always the same for a size."""
    random = np.random.default_rng(height * 10_007 + width)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> memoryview:
    """As a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return memoryview(file.getvalue())


def picture_item(data: memoryview, **options: Any) -> MediaItem:
    """One encoded picture."""
    return MediaItem("image", (data,), options=options)


def several(modality: str, images: Sequence[Image.Image], **options: Any) -> MediaItem:
    """Several pictures in one item."""
    return MediaItem(modality, tuple(png(image) for image in images), "frames", options)


def noise(samples: int) -> npt.NDArray[np.float32]:
    """Sound at 16 kHz, always the same for a length, that 16 bits hold exactly."""
    random = np.random.default_rng(samples)
    whole: npt.NDArray[np.float32] = (random.integers(-9000, 9000, samples) / 32768).astype(np.float32)
    return whole


def wav(samples: npt.NDArray[np.float32], *, container: str = "WAV") -> memoryview:
    """As a file; "MP3" and "OGG" cannot be counted by their headers."""
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=container)
    return memoryview(file.getvalue())
