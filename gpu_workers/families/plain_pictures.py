"""Pictures of families that are Hugging Face's image processor in front and get_image_features behind.

How large a picture becomes is asked of the processor itself, run on a tensor that has a size and no pixels.
An item is one picture, or several (kind "frames"), each processed as if it came alone, or what the processor
gave for it elsewhere (kind "processed").
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import torch
from transformers import AutoImageProcessor

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.features import FeatureMethod, joined
from gpu_workers.families.options import VisionOptions, adjusted, daemon_options, item_options
from gpu_workers.families.patches import check_aspect_ratio, patch_count
from gpu_workers.families.processed import ProcessedLayout, refusals_are_unfit, tensors_among
from gpu_workers.families.qwen_pictures import PROCESSOR_MAX_ASPECT_RATIO, gray_square
from gpu_workers.families.row_rules import Measured, RowRule
from gpu_workers.media.image import ImageReader, ImageSize, parse_background
from gpu_workers.media.pixels import device_memory
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

# Sizes whose outcome is remembered: a dry run takes some milliseconds, and most pictures have common sizes.
_REMEMBERED_SIZES: Final = 1024
_NO_SIZE: Final = ImageSize(0, 0)
# Pictures of different numbers of pixels and both orientations: what their outputs have in common is fixed.
_LAYOUT_SIZES: Final = (ImageSize(56, 56), ImageSize(1344, 336), ImageSize(336, 1344), ImageSize(896, 700))


class PictureSource:
    """The checkpoint's image processor and the reader in front of it. Any number of threads may use it."""

    def __init__(self, config: WorkerConfig, device: torch.device, patch_size: int | None = None) -> None:
        """device: the tower's, where the processor runs if --preprocess-device says so. patch_size: the
        processor's, whatever its file says. OSError or ValueError if the checkpoint has no image
        processor."""
        self._device = device if config.preprocess_device == "device" else torch.device("cpu")
        known, others = daemon_options("image", config.media_options.image)
        if patch_size is not None:
            others = {"patch_size": {"height": patch_size, "width": patch_size}, **others}
        processor = AutoImageProcessor.from_pretrained(
            config.checkpoint, backend="torchvision", trust_remote_code=config.trust_remote_code, **others
        )
        self._processor = _with_limits(processor, known)
        self._reader = ImageReader(config.max_pixels, parse_background(config.rgba_background))
        self._max_aspect_ratio = min(config.max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)

    @property
    def processor_name(self) -> str:
        """For messages."""
        return type(self._processor).__name__

    def size(self, file: memoryview) -> ImageSize:
        """From the header. ItemError."""
        size = self._reader.size(file)
        check_aspect_ratio(size.width, size.height, self._max_aspect_ratio)
        return size

    def process(self, file: memoryview, wanted: VisionOptions) -> dict[str, Any]:
        """The processor's outputs for one encoded picture. ItemError."""
        picture = torch.from_numpy(self._reader.rgb(file).copy()).to(self._device)
        with device_memory():
            return self._run(picture.permute(2, 0, 1), wanted)

    def dry_run(self, size: ImageSize, wanted: VisionOptions) -> dict[str, Any]:
        """The outputs for a picture of this size: pixels on the meta device, sizes and grids real. ItemError
        if the processor refuses the size."""
        return self._run_on_nothing(size, wanted, "meta")

    def _run_on_nothing(self, size: ImageSize, wanted: VisionOptions, device: str) -> dict[str, Any]:
        nothing = torch.zeros((3, size.height, size.width), dtype=torch.uint8, device=device)
        try:
            return self._run(nothing, wanted)
        except (ValueError, TypeError, ZeroDivisionError, RuntimeError):
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None

    def layout(self, names: Iterable[str], *, dry: bool = True) -> ProcessedLayout:
        """Of the outputs of these names. dry: whether runs without pixels show them. A size that the
        processor refuses tells nothing."""
        device = "meta" if dry else "cpu"
        outputs = []
        for size in _LAYOUT_SIZES:
            with suppress(ItemError):
                outputs.append(self._run_on_nothing(size, VisionOptions(), device))
        return ProcessedLayout([tensors_among(one, names) for one in outputs], first_is_free=True)

    def _run(self, picture: torch.Tensor, wanted: VisionOptions) -> dict[str, Any]:
        processor = _with_limits(self._processor, wanted)
        # Said, not guessed: a picture three pixels high looks channels-first either way.
        return dict(processor(images=[picture], input_data_format="channels_first", return_tensors="pt"))


class PlainPictures:
    """A composed.Part."""

    def __init__(
        self,
        source: PictureSource,
        method: FeatureMethod,
        rule: RowRule,
        dim: int,
        layout: ProcessedLayout,
    ) -> None:
        """layout: of the outputs that the method takes."""
        self._source = source
        self._layout = layout
        self._method = method
        self._rule = rule
        self._dim = dim
        self._measured = lru_cache(_REMEMBERED_SIZES)(self._measure_size)

    @property
    def dim(self) -> int:
        """As the tower gave it for a sample."""
        return self._dim

    def sample(self) -> MediaItem:
        """A gray square."""
        return picture_sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the headers."""
        return self.measure(item)

    def measure(self, item: MediaItem) -> ItemPlan:
        """From the headers."""
        wanted = item_options(item.options)
        if item.kind == "processed":
            arguments = self._method.arguments(self._layout.outline(item.data))
            with refusals_are_unfit():
                return plan_of([self._rule(arguments)])
        sizes = [self._source.size(file) for file in item.files]
        return plan_of([self._measured(size, wanted) for size in sizes], sizes[0])

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """What the method takes, as the processor gives it."""
        pictures = [self._method.arguments(outputs) for outputs in self._outputs(item)]
        if sum(self._rule(picture).rows for picture in pictures) != plan.rows:
            raise ItemError(ErrorCode.INTERNAL)
        return Prepared(item.modality, plan, dict(joined(pictures)))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """All pictures by one call."""
        return list(self._method.encode_together(batch))

    def _outputs(self, item: MediaItem) -> list[dict[str, Any]]:
        """The processor's, of each picture, or as they came."""
        if item.kind == "processed":
            return [dict(self._layout.outputs(item.data))]
        wanted = item_options(item.options)
        return [self._source.process(file, wanted) for file in item.files]

    def _measure_size(self, size: ImageSize, wanted: VisionOptions) -> Measured:
        return self._rule(self._method.arguments(self._source.dry_run(size, wanted)))


def plan_of(pictures: list[Measured], first: ImageSize = _NO_SIZE) -> ItemPlan:
    """Of an item of these pictures, the first of this size."""
    grids = [grid for one in pictures for grid in one.grids]
    rows = sum(one.rows for one in pictures)
    return ItemPlan(rows, grids, first.width, first.height, patch_count(grids))


def picture_sample() -> MediaItem:
    """A gray square."""
    return MediaItem("image", (memoryview(gray_square()),))


def refuse_processed(item: MediaItem) -> None:
    """ItemError(KIND_UNSUPPORTED) for tensors where pictures are wanted."""
    if item.kind == "processed":
        raise ItemError(ErrorCode.KIND_UNSUPPORTED)


def _with_limits(processor: Any, wanted: VisionOptions) -> Any:
    """ItemError(BAD_OPTION) for limits of pixels where the processor counts in another way."""
    if wanted.min_pixels is None and wanted.max_pixels is None:
        return processor
    size = getattr(processor, "size", None) or {}
    if not size.get("shortest_edge") or not size.get("longest_edge"):
        raise ItemError(ErrorCode.BAD_OPTION)
    return adjusted(processor, VisionOptions(min_pixels=wanted.min_pixels, max_pixels=wanted.max_pixels))
