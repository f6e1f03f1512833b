"""Families that are Hugging Face's processors and its model's get_*_features methods, and a rule for rows.

The reference of each is the model's own method on what its own processor makes of the same decoded pixels. A
line of _FAMILIES is all there is to a family; pictures and videos are read and batched alike for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from gpu_workers.families.base import MediaItem
from gpu_workers.families.composed import ComposedFamily, Part, compose
from gpu_workers.families.features import FeatureMethod
from gpu_workers.families.options import VisionOptions
from gpu_workers.families.plain_pictures import PictureSource, PlainPictures, picture_sample
from gpu_workers.families.plain_videos import (
    Adapt,
    PlainVideos,
    TimeRule,
    VideoSource,
    first_times,
    frames_as_pictures,
    no_times,
    unchanged,
    video_sample,
)
from gpu_workers.families.row_rules import (
    RuleFactory,
    Trial,
    any_resolution,
    cropped_to_sizes,
    equal_tiles,
    merged_grids,
    pooled_frames_and_newline,
    time_pooled_grids,
)
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig


@dataclass(frozen=True, slots=True)
class VideoTraits:
    """What is particular about a family's videos. least_frames: see VideoSource."""

    rule: RuleFactory
    method: str = "get_video_features"
    adapt: Adapt = unchanged
    times: TimeRule = no_times
    least_frames: int = 1


@dataclass(frozen=True, slots=True)
class Traits:
    """What is particular about a family. model: a class of transformers, by name, because transformers
    imports a model's code when its class is asked for. least_rows: see FeatureMethod."""

    model: str
    picture_rule: RuleFactory
    video: VideoTraits | None = None
    least_rows: int = 1


_GLM_VIDEO: Final = VideoTraits(merged_grids, times=first_times, least_frames=2)
_FAMILIES: Final = {
    "gemma3": Traits("Gemma3ForConditionalGeneration", equal_tiles),
    "llava": Traits("LlavaForConditionalGeneration", equal_tiles),
    "llava_next": Traits("LlavaNextForConditionalGeneration", any_resolution),
    "llava_onevision": Traits(
        "LlavaOnevisionForConditionalGeneration", any_resolution, VideoTraits(pooled_frames_and_newline)
    ),
    # transformers 5.24 squeezes the table of a single row away, and then cannot split it.
    "mistral3": Traits("Mistral3ForConditionalGeneration", cropped_to_sizes, least_rows=2),
    "internvl": Traits(
        "InternVLForConditionalGeneration",
        equal_tiles,
        VideoTraits(equal_tiles, method="get_image_features", adapt=frames_as_pictures),
    ),
    "glm4v": Traits("Glm4vForConditionalGeneration", merged_grids, _GLM_VIDEO),
    "glm4v_moe": Traits("Glm4vMoeForConditionalGeneration", merged_grids, _GLM_VIDEO),
    "glm46v": Traits("Glm46VForConditionalGeneration", merged_grids, _GLM_VIDEO),
    "glm_ocr": Traits("GlmOcrForConditionalGeneration", merged_grids, _GLM_VIDEO),
    "kimi_k25": Traits(
        "Kimi_K25ForConditionalGeneration",
        time_pooled_grids,
        VideoTraits(time_pooled_grids, times=first_times),
    ),
}
_PIXTRAL: Final = "pixtral"


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's tower and processors. ConfigurationError for one that cannot work."""
    traits = _FAMILIES[model_type]
    model = load_towers(
        getattr(transformers, traits.model),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    loaders: dict[str, Callable[[], Part]] = {
        "image": partial(load_pictures, config, model, _picture_rule(model, traits), traits.least_rows)
    }
    if traits.video is not None:
        loaders["video"] = partial(load_videos, config, model, traits.video)
    return compose(model, model_type, loaders)


def load_pictures(
    config: WorkerConfig, model: PreTrainedModel, rule: RuleFactory, least_rows: int
) -> PlainPictures:
    """OSError or ValueError if the checkpoint has no image processor."""
    source = PictureSource(config, model.device, _pixtral_step(model))
    outputs = source.process(picture_sample().data, VisionOptions())
    method = FeatureMethod(
        model, "get_image_features", list(outputs), source.processor_name, least_rows=least_rows
    )
    trial, dim = _try(method, outputs)
    return PlainPictures(source, method, rule(model, trial), dim, source.layout(method.takes))


def load_videos(config: WorkerConfig, model: PreTrainedModel, traits: VideoTraits) -> PlainVideos:
    """OSError or ValueError if the checkpoint has no video processor."""
    source = VideoSource(config, model.device, traits.adapt, traits.least_frames)
    outputs = _outputs_of_sample(source, video_sample())
    method = FeatureMethod(model, traits.method, list(outputs), source.processor_name)
    trial, dim = _try(method, outputs)
    layout = source.layout(method.takes)
    return PlainVideos(source, method, traits.rule(model, trial), dim, traits.times, layout)


def _outputs_of_sample(source: VideoSource, sample: MediaItem) -> dict[str, Any]:
    return source.process(sample, source.plan(sample))


def _try(method: FeatureMethod, outputs: dict[str, Any]) -> tuple[Trial, int]:
    arguments = method.arguments(outputs)
    rows = method.rows(arguments)
    return Trial(arguments, len(rows)), rows.shape[-1]


def _pixtral_step(model: PreTrainedModel) -> int | None:
    """Pixels that a picture's sides are multiples of: what PixtralProcessor tells its image processor, whose
    file names the patch alone. None for other towers."""
    vision = model.config.vision_config
    if getattr(vision, "model_type", "") != _PIXTRAL:
        return None
    return int(vision.patch_size) * int(getattr(model.config, "spatial_merge_size", 1))


def _picture_rule(model: PreTrainedModel, traits: Traits) -> RuleFactory:
    """LLaVA's class also has Pixtral's tower in it."""
    if getattr(model.config.vision_config, "model_type", "") == _PIXTRAL:
        return cropped_to_sizes
    return traits.picture_rule
