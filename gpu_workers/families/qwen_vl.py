"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures.

The reference is the model's own get_image_features on what AutoImageProcessor (torchvision backend) makes of
the picture. Qwen3-VL's DeepStack levels follow the main embedding on the last dimension of each row, so its
rows are out_hidden_size * (1 + levels) wide.
"""

import io
import math
from typing import Any, Final

import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import FamilyInfo, ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.media.image import ImageReader, parse_background
from gpu_workers.towers import load_towers, payload_dtype, tower_bytes
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

# By name: transformers imports a model's code when its class is asked for, seconds for each.
_MODEL_CLASSES: Final = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_PROCESSOR_MAX_ASPECT_RATIO: Final = 200  # smart_resize refuses more
_SAMPLE_SIDE_PIXELS: Final = 56


def load(config: WorkerConfig, device: torch.device, model_type: str) -> "QwenVl":
    """Load the checkpoint's tower and processor. ConfigurationError for one that cannot work."""
    model = load_towers(
        getattr(transformers, _MODEL_CLASSES[model_type]),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    try:
        processor = AutoImageProcessor.from_pretrained(
            config.checkpoint, backend="torchvision", trust_remote_code=config.trust_remote_code
        )
    except OSError as error:
        raise ConfigurationError(f"the checkpoint has no image processor: {error}") from None
    reader = ImageReader(config.max_pixels, parse_background(config.rgba_background))
    return QwenVl(model, processor, reader, config.max_aspect_ratio)


class QwenVl:
    """One loaded checkpoint of the three families."""

    def __init__(
        self, model: PreTrainedModel, processor: Any, reader: ImageReader, max_aspect_ratio: int
    ) -> None:
        """processor: a Qwen2VLImageProcessor. max_aspect_ratio: longer side to shorter side."""
        self._model = model
        self._processor = processor
        self._reader = reader
        self._max_aspect_ratio = min(max_aspect_ratio, _PROCESSOR_MAX_ASPECT_RATIO)
        self._info = FamilyInfo(
            model_type=model.config.model_type,
            modalities=("image",),
            dim=_row_width(model.config.vision_config),
            dtype=payload_dtype(model.dtype),
            tower_bytes=tower_bytes(model),
        )

    def info(self) -> FamilyInfo:
        """Pictures; dim with all DeepStack columns."""
        return self._info

    def samples(self) -> list[MediaItem]:
        """A gray square."""
        file = io.BytesIO()
        Image.new("RGB", (_SAMPLE_SIDE_PIXELS, _SAMPLE_SIDE_PIXELS), "gray").save(file, "PNG")
        return [MediaItem("image", (memoryview(file.getvalue()),))]

    def inspect(self, item: MediaItem) -> ItemPlan:
        """From the header, by the processor's own resize rule."""
        size = self._reader.size(item.data)
        self._check_aspect_ratio(size.width, size.height)
        processor = self._processor
        resized_height, resized_width = smart_resize(
            size.height,
            size.width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        grid = [1, resized_height // processor.patch_size, resized_width // processor.patch_size]
        patches = math.prod(grid)
        return ItemPlan(
            rows=patches // processor.merge_size**2,
            grids=[grid],
            width=size.width,
            height=size.height,
            cost_patches=patches,
        )

    def measure(self, item: MediaItem) -> ItemPlan:
        """Never needed."""
        return self.inspect(item)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """pixel_values (patches, channels * temporal * patch * patch) float32 and image_grid_thw (1, 3)."""
        picture = torch.from_numpy(self._reader.rgb(item.data)).permute(2, 0, 1)
        # Said, not guessed: a picture three pixels high looks channels-first either way.
        features = self._processor(images=[picture], input_data_format="channels_first", return_tensors="pt")
        if features["image_grid_thw"].tolist() != plan.grids:
            raise ItemError(ErrorCode.INTERNAL)
        return Prepared(item.modality, plan, dict(features))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_image_features on all pictures together."""
        with torch.inference_mode():
            output = self._model.get_image_features(
                pixel_values=self._on_device(batch, "pixel_values"),
                image_grid_thw=self._on_device(batch, "image_grid_thw"),
            )
            levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
            return [torch.cat(rows_of_levels, dim=-1) for rows_of_levels in zip(*levels, strict=True)]

    def _on_device(self, batch: list[Prepared], name: str) -> torch.Tensor:
        together = torch.cat([prepared.features[name] for prepared in batch])
        return together.to(self._model.device, non_blocking=True)

    def _check_aspect_ratio(self, width: int, height: int) -> None:
        ratio = max(width, height) / min(width, height)
        if ratio > self._max_aspect_ratio:
            raise ItemError(ErrorCode.ASPECT_RATIO, math.ceil(ratio), self._max_aspect_ratio)


def _row_width(vision_config: Any) -> int:
    """Elements of a row: Qwen2-VL calls its merger's output hidden_size, the others out_hidden_size."""
    width: int = getattr(vision_config, "out_hidden_size", vision_config.hidden_size)
    return width * (1 + len(getattr(vision_config, "deepstack_visual_indexes", ())))
