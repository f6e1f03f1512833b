"""Pictures of the Qwen families: Qwen2VLImageProcessor in front, get_image_features behind.

An item is one picture, several pictures (kind "frames"), each with a grid of its own, or processed tensors.
"""

import io
from typing import Any, Final

import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.options import VisionOptions, adjusted, daemon_options, item_options
from gpu_workers.families.patches import (
    Grids,
    check_aspect_ratio,
    encode_patches,
    patch_count,
    patch_width,
    processed_grids,
    processed_pixels,
    row_width,
)
from gpu_workers.media.image import ImageReader, ImageSize, parse_background
from gpu_workers.media.pixels import Pixels, open_pixels
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

PROCESSOR_MAX_ASPECT_RATIO: Final = 200  # smart_resize refuses more
_NAMES: Final = ("pixel_values", "image_grid_thw")
_SAMPLE_SIDE_PIXELS: Final = 56


def load_pictures(config: WorkerConfig, model: PreTrainedModel) -> "QwenPictures":
    """The checkpoint's pictures. OSError or ValueError if it has no image processor."""
    known, others = daemon_options("image", config.media_options.image)
    processor = AutoImageProcessor.from_pretrained(
        config.checkpoint, backend="torchvision", trust_remote_code=config.trust_remote_code, **others
    )
    reader = ImageReader(config.max_pixels, parse_background(config.rgba_background))
    adjusted_processor = adjusted(processor, known)
    pixels = open_pixels(
        adjusted_processor, dtype=model.dtype, device=model.device, where=config.preprocess_device
    )
    return QwenPictures(model, adjusted_processor, pixels, reader, config.max_aspect_ratio, config.max_pixels)


def gray_square() -> bytes:
    """A small PNG."""
    file = io.BytesIO()
    Image.new("RGB", (_SAMPLE_SIDE_PIXELS, _SAMPLE_SIDE_PIXELS), "gray").save(file, "PNG")
    return file.getvalue()


class QwenPictures:
    """A composed.Part."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any,
        pixels: Pixels,
        reader: ImageReader,
        max_aspect_ratio: int,
        max_pixels: int,
    ) -> None:
        """processor: a Qwen2VLImageProcessor with the daemon's options. pixels: its arithmetic.
        max_aspect_ratio: longer to shorter side. max_pixels: of one picture, whatever an item's options ask
        for."""
        self._model = model
        self._processor = processor
        self._pixels = pixels
        self._reader = reader
        self._max_aspect_ratio = min(max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)
        self._max_pixels = max_pixels

    @property
    def dim(self) -> int:
        """With all DeepStack columns."""
        return row_width(self._model.config.vision_config)

    def sample(self) -> MediaItem:
        """A gray square."""
        return MediaItem("image", (memoryview(gray_square()),))

    def inspect(self, item: MediaItem) -> ItemPlan:
        """From the headers, by the processor's own resize rule."""
        wanted = item_options(item.options)
        if item.kind == "processed":
            return self._plan(processed_grids(item, _NAMES, self._processor), ImageSize(0, 0))
        sizes = [self._reader.size(file) for file in item.files]
        processor = self._for_item(wanted)
        return self._plan([self._grid(size, processor) for size in sizes], sizes[0])

    def measure(self, item: MediaItem) -> ItemPlan:
        """Never needed: headers tell."""
        return self.inspect(item)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """pixel_values (patches, channels * temporal * patch * patch) and image_grid_thw (grids, 3)."""
        if item.kind == "processed":
            features = processed_pixels(item, _NAMES, patch_width(self._processor))
        else:
            pixels = [self._process(file, grid) for file, grid in zip(item.files, plan.grids, strict=True)]
            together = pixels[0] if len(pixels) == 1 else torch.cat(pixels)
            features = {"pixel_values": together, "image_grid_thw": torch.tensor(plan.grids)}
        return Prepared(item.modality, plan, {**features})

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_image_features on all pictures together."""
        return encode_patches(self._model, self._model.get_image_features, batch, _NAMES)

    def _for_item(self, wanted: VisionOptions) -> Any:
        """The processor with an item's own limits of pixels."""
        return adjusted(
            self._processor, VisionOptions(min_pixels=wanted.min_pixels, max_pixels=wanted.max_pixels)
        )

    def _grid(self, size: ImageSize, processor: Any) -> list[int]:
        check_aspect_ratio(size.width, size.height, self._max_aspect_ratio)
        height, width = smart_resize(
            size.height,
            size.width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        if height * width > self._max_pixels:
            raise ItemError(ErrorCode.BAD_OPTION)
        return [1, height // processor.patch_size, width // processor.patch_size]

    def _plan(self, grids: Grids, first: ImageSize) -> ItemPlan:
        patches = patch_count(grids)
        rows = patches // self._processor.merge_size**2
        return ItemPlan(rows, grids, first.width, first.height, patches)

    def _process(self, file: memoryview, grid: list[int]) -> torch.Tensor:
        _, rows, columns = grid
        side = self._processor.patch_size
        return self._pixels.pixel_values(self._reader.rgb(file)[None], rows * side, columns * side)
