"""Any model that transformers knows and that has get_image_features, get_video_features or
get_audio_features.

Nothing is known of how many rows an item becomes, so the tower is tried: on noise of the shapes that the
processor gives, once for each combination of shapes, sizes and grids. Such models encode item by item.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, Final

import torch
import transformers
from torch import distributed
from transformers import AutoConfig, PreTrainedModel

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.composed import ComposedFamily, Part, compose
from gpu_workers.families.features import FeatureMethod, Tensors
from gpu_workers.families.options import VisionOptions, item_options
from gpu_workers.families.plain_pictures import (
    PictureSource,
    PlainPictures,
    picture_sample,
    plan_of,
)
from gpu_workers.families.plain_videos import PlainVideos, VideoSource, no_times, video_sample
from gpu_workers.families.processed import ProcessedLayout
from gpu_workers.families.row_rules import Measured, patch_sides, pixels_of, tile_grids
from gpu_workers.families.tried_sounds import SoundSource, TriedSounds
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)

_PICTURES: Final = "get_image_features"
_VIDEOS: Final = "get_video_features"
_SOUNDS: Final = "get_audio_features"
_REMEMBERED_SHAPES: Final = 65_536
# What a tower raises for tensors of shapes, or with numbers, that it does not take.
_REFUSALS: Final = (ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's towers and processors. ConfigurationError that names what is missing."""
    model = load_towers(
        _model_class(config, model_type),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    return compose_tried(config, model, model_type)


def compose_tried(config: WorkerConfig, model: PreTrainedModel, model_type: str) -> ComposedFamily:
    """The family of a loaded model. ConfigurationError that names what is missing."""
    loaders: dict[str, Callable[[], Part]] = {}
    if hasattr(model, _PICTURES):
        loaders["image"] = partial(_load_pictures, config, model)
    if hasattr(model, _VIDEOS):
        loaders["video"] = partial(_load_videos, config, model)
    if hasattr(model, _SOUNDS):
        loaders["audio"] = partial(_load_sounds, config, model)
    if not loaders:
        raise ConfigurationError(
            f"model_type {model_type!r} is not supported: "
            f"{type(model).__name__} has neither {_PICTURES} nor {_VIDEOS} nor {_SOUNDS}"
        )
    logger.warning("%s has no rule for rows: its towers are tried, and encode item by item", model_type)
    return compose(model, model_type, loaders)


class RowsByTrial:
    """A row_rules.RowRule that runs the tower on noise. Remembers what it found; safe for several threads."""

    def __init__(self, model: PreTrainedModel, method: FeatureMethod, *, masks_count: bool = False) -> None:
        """masks_count: what stands in a mask makes a difference, not only its shape.

        ConfigurationError in a group that shares weights: its ranks forward what rank 0 plans and no more.
        """
        if distributed.is_available() and distributed.is_initialized():
            raise ConfigurationError(
                f"{type(model).__name__} has no rule for rows, and ranks that share weights cannot try it "
                "one by one: --tp-mode data works with any"
            )
        self._method = method
        self._masks_count = masks_count
        self._patch = patch_sides(model)
        self._rows: dict[object, int] = {}
        self._trial = threading.Lock()

    def __call__(self, arguments: Tensors) -> Measured:
        """Runs the tower unless it has met these shapes before."""
        return Measured(self.rows(arguments), _grids(arguments, self._patch))

    def rows(self, arguments: Tensors) -> int:
        """As a call, of anything that has no grids."""
        key = self._key(arguments)
        with self._trial:
            if key not in self._rows:
                noise = {name: _noise(tensor) for name, tensor in arguments.items()}
                if len(self._rows) == _REMEMBERED_SHAPES:
                    self._rows.pop(next(iter(self._rows)))
                self._rows[key] = len(self._method.rows(noise))
            return self._rows[key]

    def _key(self, arguments: Tensors) -> object:
        return _key(arguments, masks_count=self._masks_count)

    def knows(self, arguments: Tensors) -> bool:
        """Whether a call returns at once."""
        return self._key(arguments) in self._rows


class TriedPictures(PlainPictures):
    """Pictures whose rows only a trial tells."""

    def __init__(
        self,
        source: PictureSource,
        method: FeatureMethod,
        rule: RowsByTrial,
        dim: int,
        layout: ProcessedLayout,
        *,
        dry: bool,
    ) -> None:
        """dry: whether the processor runs on pictures without pixels; otherwise they are decoded early."""
        super().__init__(source, method, rule, dim, layout)
        self._trial = rule
        self._dry = dry

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the headers, where the tower has met the shapes before."""
        if item.kind == "processed":
            return None
        wanted = item_options(item.options)
        sizes = [self._source.size(file) for file in item.files]
        if not self._dry:
            return None
        outputs = [self._method.arguments(self._source.dry_run(size, wanted)) for size in sizes]
        return super().measure(item) if all(self._trial.knows(picture) for picture in outputs) else None

    def measure(self, item: MediaItem) -> ItemPlan:
        """With a trial where needed."""
        if self._dry or item.kind == "processed":
            return super().measure(item)
        wanted = item_options(item.options)
        outputs = [self._method.arguments(self._source.process(file, wanted)) for file in item.files]
        return plan_of([self._rule(picture) for picture in outputs], self._source.size(item.data))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """One call for each item."""
        return list(self._method.encode_singly(batch))


class TriedVideos(PlainVideos):
    """Videos whose rows only a trial tells."""

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Never: a trial is nothing to wait for."""
        item_options(item.options)
        return None

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """One call for each item."""
        return list(self._method.encode_singly(batch))


def _model_class(config: WorkerConfig, model_type: str) -> type[PreTrainedModel]:
    """The class that the checkpoint names. ConfigurationError if transformers has none of that name."""
    try:
        described = AutoConfig.from_pretrained(config.checkpoint, trust_remote_code=config.trust_remote_code)
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        hint = "" if config.trust_remote_code else " (its own code runs only with --trust-remote-code)"
        raise ConfigurationError(f"model_type {model_type!r} is not supported: {reason}{hint}") from None
    for name in described.architectures or ():
        found: type[PreTrainedModel] | None = getattr(transformers, name, None)
        if found is not None:
            return found
    raise ConfigurationError(
        f"model_type {model_type!r} is not supported: transformers {transformers.__version__} has no class "
        f"{' or '.join(described.architectures or ['that the checkpoint names'])}"
    )


def _load_pictures(config: WorkerConfig, model: PreTrainedModel) -> TriedPictures:
    source = PictureSource(config, model.device)
    sample = picture_sample()
    outputs = source.process(sample.data, VisionOptions())
    method = FeatureMethod(model, _PICTURES, list(outputs), source.processor_name)
    dim = _width(method, outputs)
    try:
        dry = source.dry_run(source.size(sample.data), VisionOptions())
        same = _key(method.arguments(dry)) == _key(method.arguments(outputs))
    except ItemError:
        same = False
    layout = source.layout(method.takes, dry=same)
    return TriedPictures(source, method, RowsByTrial(model, method), dim, layout, dry=same)


def _load_videos(config: WorkerConfig, model: PreTrainedModel) -> TriedVideos:
    source = VideoSource(config, model.device)
    sample = video_sample()
    outputs = source.process(sample, source.plan(sample))
    method = FeatureMethod(model, _VIDEOS, list(outputs), source.processor_name)
    layout = source.layout(method.takes)
    return TriedVideos(source, method, RowsByTrial(model, method), _width(method, outputs), no_times, layout)


def _load_sounds(config: WorkerConfig, model: PreTrainedModel) -> TriedSounds:
    source = SoundSource(config, model)
    outputs = source.process_sample()
    method = FeatureMethod(model, _SOUNDS, list(outputs), source.processor_name)
    rule = RowsByTrial(model, method, masks_count=True)
    return TriedSounds(source, method, rule.rows, _width(method, outputs), source.layout(method.takes))


def _width(method: FeatureMethod, outputs: dict[str, Any]) -> int:
    try:
        return int(method.rows(method.arguments(outputs)).shape[-1])
    except _REFUSALS as error:
        raise ConfigurationError(f"the tower does not take what its processor gives: {error}") from error


def _key(arguments: Tensors, *, masks_count: bool = False) -> object:
    """Shapes of all, and what stands in the small integer ones (grids, sizes); masks by shape, or as a
    digest."""
    return tuple(
        (name, tuple(tensor.shape), _contents(name, tensor, masks_count=masks_count))
        for name, tensor in arguments.items()
    )


def _contents(name: str, tensor: torch.Tensor, *, masks_count: bool) -> str:
    if tensor.is_meta or tensor.is_floating_point():
        return ""
    if name.endswith("mask"):
        return sha256(tensor.contiguous().numpy()).hexdigest() if masks_count else ""
    return str(tensor.tolist())


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    """Real tensors as they are; in place of others, values that no model takes for padding."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.full(tensor.shape, 0.5, dtype=tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _grids(arguments: Tensors, patch: tuple[int, int]) -> list[list[int]]:
    """The processor's own, or one for each tile or frame; of flat patches, their count."""
    for name, tensor in arguments.items():
        if name.endswith("grid_thw"):
            grids: list[list[int]] = tensor.tolist()
            return grids
    pixels = pixels_of(arguments)
    return tile_grids(pixels, patch) if pixels.dim() > 3 else [[1, 1, len(pixels)]]
