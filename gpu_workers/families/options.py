"""Processor options: those of the daemon (--mm-process-config) and those of one item, checked and applied.

Hugging Face's processors keep their options as attributes, so an item with options of its own is processed by
a shallow copy that has other ones.
"""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from transformers.image_utils import SizeDict

from gpu_workers.errors import ConfigurationError, ItemError
from shm.errors import ErrorCode

DEFAULT_FPS: Final = 2.0
DEFAULT_MIN_FRAMES: Final = 4
DEFAULT_MAX_FRAMES: Final = 768
# How SGLang's clients hand options on.
_NESTED_KEY: Final = "preprocess_kwargs"

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class VisionOptions(msgspec.Struct, frozen=True):
    """Options of pictures and videos that encoderd itself understands; pixels are counted for each frame or
    video as the processor's own size is. Whatever else an item has is not for the processor."""

    min_pixels: _Count | None = None
    max_pixels: _Count | None = None
    fps: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    num_frames: _Count | None = None
    min_frames: _Count | None = None
    max_frames: _Count | None = None


_KNOWN: Final = frozenset(VisionOptions.__struct_fields__)


def item_options(options: Mapping[str, Any]) -> VisionOptions:
    """Of one item. ItemError(BAD_OPTION) for a value that makes no sense."""
    nested = options.get(_NESTED_KEY)
    merged = {**options, **nested} if isinstance(nested, Mapping) else options
    try:
        wanted = msgspec.convert(merged, VisionOptions)
    except msgspec.ValidationError:
        raise ItemError(ErrorCode.BAD_OPTION) from None
    if wanted.num_frames is not None and wanted.fps is not None:
        raise ItemError(ErrorCode.BAD_OPTION)
    return wanted


def daemon_options(modality: str, options: Mapping[str, Any]) -> tuple[VisionOptions, dict[str, Any]]:
    """Of --mm-process-config: what encoderd understands, and the rest, which goes to the processor as it is.

    ConfigurationError for a value that makes no sense.
    """
    try:
        known = msgspec.convert(options, VisionOptions)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"--mm-process-config {modality}: {error}") from None
    return known, {name: value for name, value in options.items() if name not in _KNOWN}


def adjusted(processor: Any, wanted: VisionOptions) -> Any:
    """processor, or a copy of it with these options. ItemError(BAD_OPTION) if they contradict its own."""
    changes = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    if not changes:
        return processor
    changed = copy.copy(processor)
    shortest = changes.pop("min_pixels", None)
    longest = changes.pop("max_pixels", None)
    if shortest is not None or longest is not None:
        changed.size = _pixel_limits(processor.size, shortest, longest)
    for name, value in changes.items():
        setattr(changed, name, value)
    if wanted.num_frames is not None:
        changed.fps = None
    elif wanted.fps is not None:
        changed.num_frames = None
    return changed


def with_default_sampling(processor: Any) -> Any:
    """A copy of a video processor that has a rate and limits of frames in any case."""
    changed = copy.copy(processor)
    if getattr(changed, "num_frames", None) is None and getattr(changed, "fps", None) is None:
        changed.fps = DEFAULT_FPS
    changed.min_frames = getattr(changed, "min_frames", None) or DEFAULT_MIN_FRAMES
    changed.max_frames = getattr(changed, "max_frames", None) or DEFAULT_MAX_FRAMES
    return changed


def _pixel_limits(size: Any, shortest: int | None, longest: int | None) -> SizeDict:
    """One limit alone moves the other out of its way, as long as both stay in order."""
    low = shortest if shortest is not None else min(size["shortest_edge"], longest or size["shortest_edge"])
    high = longest if longest is not None else max(size["longest_edge"], low)
    if low > high:
        raise ItemError(ErrorCode.BAD_OPTION)
    return SizeDict(shortest_edge=low, longest_edge=high)
