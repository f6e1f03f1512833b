"""How many rows and which grids an item becomes, from the shapes of the processor's outputs.

The outputs may be on the meta device: only shapes and the small integer tensors (grids, sizes), which are
always real, are looked at. So one rule serves the headers, before any decode, and the pixels after it.

They may also come from outside, as an already processed item: a rule raises ItemError for tensors that do not
belong together, so that the tower never meets them.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedModel

from gpu_workers.families.features import Tensors
from gpu_workers.families.patches import Grids, check_merges, patch_count
from gpu_workers.families.processed import out_of_range, wrong_size

_PICTURES_OF_PROMPT: Final = "batch_num_images"


class Measured(NamedTuple):
    """Of one picture or video."""

    rows: int
    grids: Grids


RowRule: TypeAlias = Callable[[Tensors], Measured]


class Trial(NamedTuple):
    """What the tower made of a sample when it was loaded."""

    arguments: Tensors
    rows: int


RuleFactory: TypeAlias = Callable[[PreTrainedModel, Trial], RowRule]


def equal_tiles(model: PreTrainedModel, trial: Trial) -> RowRule:
    """Tiles of one size, each with as many rows as any other: LLaVA with CLIP, Gemma 3, InternVL."""
    patch = patch_sides(model)
    rows_of_tile = trial.rows // len(tile_grids(pixels_of(trial.arguments), patch))

    def rule(arguments: Tensors) -> Measured:
        grids = tile_grids(pixels_of(arguments), patch)
        return Measured(rows_of_tile * len(grids), grids)

    return rule


def merged_grids(model: PreTrainedModel, trial: Trial) -> RowRule:
    """Grids (t, h, w) whose merge x merge patches of one t become one row: GLM-4V."""
    patches = sum(math.prod(grid) for grid in grids_of(trial.arguments))
    merge = math.isqrt(patches // trial.rows)

    def rule(arguments: Tensors) -> Measured:
        grids = checked_grids(arguments, merge)
        return Measured(sum(math.prod(grid) for grid in grids) * trial.rows // patches, grids)

    return rule


def time_pooled_grids(model: PreTrainedModel, trial: Trial) -> RowRule:
    """As merged_grids, with all t of a grid averaged into one: Kimi, whose tower knows so many t."""
    patches = sum(height * width for _, height, width in grids_of(trial.arguments))
    merge = math.isqrt(patches // trial.rows)
    longest: int = model.config.vision_config.pos_emb_time

    def rule(arguments: Tensors) -> Measured:
        grids = checked_grids(arguments, merge)
        for steps, _, _ in grids:
            if steps > longest:
                raise out_of_range(_grid_name(arguments), steps, longest)
        return Measured(sum(height * width for _, height, width in grids) * trial.rows // patches, grids)

    return rule


def cropped_to_sizes(model: PreTrainedModel, trial: Trial) -> RowRule:
    """Pictures padded to the largest and cropped to image_sizes in the tower: Pixtral's, with or without a
    merge of spatial_merge_size behind it."""
    patch_height, patch_width = patch_sides(model)
    merge: int = getattr(model.config, "spatial_merge_size", 1)

    def rule(arguments: Tensors) -> Measured:
        sizes = _sizes_within(arguments, (patch_height * merge, patch_width * merge))
        rows = sum(
            (height // (patch_height * merge)) * (width // (patch_width * merge)) for height, width in sizes
        )
        return Measured(rows, [[1, height // patch_height, width // patch_width] for height, width in sizes])

    return rule


def any_resolution(model: PreTrainedModel, trial: Trial) -> RowRule:
    """A small whole picture and tiles, unpadded, each line ended by a newline: LLaVA-NeXT, LLaVA-OneVision.

    The rows are counted by the model's own packing, on tensors without data.
    """
    patch = patch_sides(model)
    side = model.config.vision_config.image_size
    tile_rows = (side // patch[0]) * (side // patch[1])
    ratio = getattr(model.config, "vision_aspect_ratio", None)
    how: dict[str, Any] = (
        {"vision_aspect_ratio": ratio}
        if ratio is not None
        else {"vision_feature_select_strategy": model.config.vision_feature_select_strategy}
    )

    def rule(arguments: Tensors) -> Measured:
        pixels, sizes = pixels_of(arguments), arguments["image_sizes"].tolist()
        counts = [_tiles_of(model, size) for size in sizes]
        if len(sizes) != len(pixels):
            raise wrong_size("image_sizes", 0, len(sizes), len(pixels))
        _check_alone(arguments, len(sizes))
        if max(counts) != pixels.shape[1]:
            raise wrong_size(_pixel_name(arguments), 1, pixels.shape[1], max(counts))
        newline = torch.empty(1, device="meta")
        packed, _ = model.model.pack_image_features(
            [torch.empty((count, tile_rows, 1), device="meta") for count in counts],
            sizes,
            image_newline=newline,
            **how,
        )
        grids = [grid for count in counts for grid in tile_grids(pixels[0, :count], patch)]
        return Measured(sum(len(table) for table in packed), grids)

    return rule


def _check_alone(arguments: Tensors, pictures: int) -> None:
    """ItemError for pictures that a prompt has several of, which LLaVA-OneVision would not cut into tiles."""
    together = arguments.get(_PICTURES_OF_PROMPT)
    if together is None:
        return
    if len(together) != pictures:
        raise wrong_size(_PICTURES_OF_PROMPT, 0, len(together), pictures)
    if int(together.max()) > 1:
        raise out_of_range(_PICTURES_OF_PROMPT, int(together.max()), 1)


def _tiles_of(model: PreTrainedModel, size: list[int]) -> int:
    """Tiles of a picture of this (height, width), the small whole one among them, by the model's count."""
    code = import_module(type(model.model).__module__)
    tiles: int = code.image_size_to_num_patches(
        size, model.config.image_grid_pinpoints, model.config.vision_config.image_size
    )
    return tiles


def pooled_frames_and_newline(model: PreTrainedModel, trial: Trial) -> RowRule:
    """Frames of one size, each with as many rows as any other, and one row at the end: OneVision's videos."""
    patch = patch_sides(model)
    rows_of_frame = (trial.rows - 1) // len(tile_grids(pixels_of(trial.arguments), patch))

    def rule(arguments: Tensors) -> Measured:
        grids = tile_grids(pixels_of(arguments), patch)
        return Measured(rows_of_frame * len(grids) + 1, grids)

    return rule


def patch_sides(model: PreTrainedModel) -> tuple[int, int]:
    """(height, width) of a patch in pixels; (1, 1) where the config does not say."""
    size = getattr(getattr(model.config, "vision_config", None), "patch_size", None) or 1
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def pixels_of(arguments: Tensors) -> torch.Tensor:
    """The pixel values, of pictures or videos."""
    return arguments[_pixel_name(arguments)]


def grids_of(arguments: Tensors) -> Grids:
    """The grids that the processor gives."""
    grids: Grids = arguments[_grid_name(arguments)].tolist()
    return grids


def checked_grids(arguments: Tensors, merge: int) -> Grids:
    """The grids, if the pixels are as many patches as they say, and the merger can divide them. ItemError."""
    grids, pixels = grids_of(arguments), pixels_of(arguments)
    check_merges(grids, _grid_name(arguments), merge)
    if len(pixels) != patch_count(grids):
        raise wrong_size(_pixel_name(arguments), 0, len(pixels), patch_count(grids))
    return grids


def _sizes_within(arguments: Tensors, least: tuple[int, int]) -> list[list[int]]:
    """image_sizes, each of which gives a row and lies within its picture of pixel_values. ItemError."""
    sizes: list[list[int]] = arguments["image_sizes"].tolist()
    pictures, _, *padded = pixels_of(arguments).shape
    if len(sizes) != pictures:
        raise wrong_size("image_sizes", 0, len(sizes), pictures)
    for size in sizes:
        for side, shortest, longest in zip(size, least, padded, strict=True):
            if side < shortest or side > longest:
                raise out_of_range("image_sizes", side, longest)
    return sizes


def _grid_name(arguments: Tensors) -> str:
    return next(name for name in arguments if name.endswith("grid_thw"))


def _pixel_name(arguments: Tensors) -> str:
    return next(name for name in arguments if name.startswith("pixel_values"))


def tile_grids(pixels: torch.Tensor, patch: tuple[int, int]) -> Grids:
    """One grid for each tile or frame; pixels: (..., channels, height, width)."""
    *tiles, _, height, width = pixels.shape
    return [[1, height // patch[0], width // patch[1]] for _ in range(math.prod(tiles))]
