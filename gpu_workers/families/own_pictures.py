"""Pictures of a checkpoint whose image processor is its own code: given Pillow's pictures, one at a time.

Such a processor cannot be asked for sizes without pixels, so a picture is processed to be measured. Its size
alone decides the outcome: once a picture of a size has been measured, the next one is known from its header.
"""

import math
import threading
from typing import Any, Final, TypeAlias

import torch
from PIL import Image
from transformers import PreTrainedModel

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.features import FeatureMethod, joined
from gpu_workers.families.options import VisionOptions, item_options
from gpu_workers.families.patches import check_aspect_ratio
from gpu_workers.families.plain_pictures import picture_sample, plan_of
from gpu_workers.families.qwen_pictures import PROCESSOR_MAX_ASPECT_RATIO
from gpu_workers.families.row_rules import Measured
from gpu_workers.media.image import ImageReader, ImageSize, parse_background
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

Arguments: TypeAlias = dict[str, torch.Tensor]

_REMEMBERED_SIZES: Final = 1024


class LoadedPictures:
    """Encoded pictures -> Pillow's, checked. Any number of threads may use it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._reader = ImageReader(config.max_pixels, parse_background(config.rgba_background))
        self._max_aspect_ratio = min(config.max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)

    def size(self, file: memoryview) -> ImageSize:
        """From the header. ItemError."""
        size = self._reader.size(file)
        check_aspect_ratio(size.width, size.height, self._max_aspect_ratio)
        return size

    def picture(self, file: memoryview) -> Image.Image:
        """Upright, RGB. ItemError."""
        self.size(file)
        return Image.fromarray(self._reader.rgb(file))


class OwnPictures:
    """A composed.Part for models whose grids are (h, w) in image_grid_hws: Kimi-VL."""

    def __init__(self, config: WorkerConfig, model: PreTrainedModel, method: str, processor: Any) -> None:
        """method: takes pixel_values and image_grid_hws."""
        self._pictures = LoadedPictures(config)
        self._processor = processor
        outputs = self._process(self._pictures.picture(picture_sample().data))
        self._method = FeatureMethod(model, method, list(outputs), type(processor).__name__)
        arguments = self._method.arguments(outputs)
        rows = self._method.rows(arguments)
        self._dim = int(rows.shape[-1])
        self._patches_of_row = _patches(arguments) // len(rows)
        self._known: dict[ImageSize, Measured] = {}
        self._learning = threading.Lock()

    @property
    def dim(self) -> int:
        """As the tower gave it for a sample."""
        return self._dim

    def sample(self) -> MediaItem:
        """A gray square."""
        return picture_sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the headers, where pictures of these sizes have been measured."""
        sizes = self._sizes(item)
        with self._learning:
            known = [self._known.get(size) for size in sizes]
        measured = [one for one in known if one is not None]
        return plan_of(measured, sizes[0]) if len(measured) == len(sizes) else None

    def measure(self, item: MediaItem) -> ItemPlan:
        """By processing."""
        sizes = self._sizes(item)
        measured = [self._measured(self._arguments(file)) for file in item.files]
        with self._learning:
            if len(self._known) > _REMEMBERED_SIZES:
                self._known.clear()
            self._known.update(zip(sizes, measured, strict=True))
        return plan_of(measured, sizes[0])

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """What the method takes."""
        pictures = [self._arguments(file) for file in item.files]
        if sum(self._measured(picture).rows for picture in pictures) != plan.rows:
            raise ItemError(ErrorCode.INTERNAL)
        return Prepared(item.modality, plan, dict(joined(pictures)))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """All pictures by one call."""
        return list(self._method.encode_together(batch))

    def _sizes(self, item: MediaItem) -> list[ImageSize]:
        """ItemError, also for processor options: there is no telling which the processor has."""
        if item.kind == "processed":
            raise ItemError(ErrorCode.KIND_UNSUPPORTED)
        refuse_options(item)
        return [self._pictures.size(file) for file in item.files]

    def _arguments(self, file: memoryview) -> Arguments:
        return self._method.arguments(self._process(self._pictures.picture(file)))

    def _process(self, picture: Image.Image) -> dict[str, Any]:
        try:
            return dict(self._processor(images=[picture], return_tensors="pt"))
        except ValueError:  # how processors refuse sizes
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None

    def _measured(self, arguments: Arguments) -> Measured:
        return Measured(_patches(arguments) // self._patches_of_row, arguments["image_grid_hws"].tolist())


def refuse_options(item: MediaItem) -> None:
    """ItemError(BAD_OPTION) for options that cannot be applied by what runs in the checkpoint's own code."""
    if item_options(item.options) != VisionOptions():
        raise ItemError(ErrorCode.BAD_OPTION)


def _patches(arguments: Arguments) -> int:
    return sum(math.prod(grid) for grid in arguments["image_grid_hws"].tolist())
