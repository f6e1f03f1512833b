"""How many rows and which grids an item becomes, from the shapes of the processor's outputs.

The outputs may be on the meta device: only shapes and the small integer tensors (grids, sizes), which are
always real, are looked at. So one rule serves the headers, before any decode, and the pixels after it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedModel

from gpu_workers.families.features import Tensors
from gpu_workers.families.patches import Grids


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

    def rule(arguments: Tensors) -> Measured:
        grids = grids_of(arguments)
        return Measured(sum(math.prod(grid) for grid in grids) * trial.rows // patches, grids)

    return rule


def time_pooled_grids(model: PreTrainedModel, trial: Trial) -> RowRule:
    """As merged_grids, with all t of a grid averaged into one: Kimi."""
    patches = sum(height * width for _, height, width in grids_of(trial.arguments))

    def rule(arguments: Tensors) -> Measured:
        grids = grids_of(arguments)
        return Measured(sum(height * width for _, height, width in grids) * trial.rows // patches, grids)

    return rule


def cropped_to_sizes(model: PreTrainedModel, trial: Trial) -> RowRule:
    """Pictures padded to the largest and cropped to image_sizes in the tower: Pixtral's, with or without a
    merge of spatial_merge_size behind it."""
    patch_height, patch_width = patch_sides(model)
    merge: int = getattr(model.config, "spatial_merge_size", 1)

    def rule(arguments: Tensors) -> Measured:
        sizes: list[list[int]] = arguments["image_sizes"].tolist()
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
        grids = tile_grids(pixels_of(arguments), patch)
        tiles = torch.empty((len(grids), tile_rows, 1), device="meta")
        newline = torch.empty(1, device="meta")
        packed, _ = model.model.pack_image_features(
            [tiles], arguments["image_sizes"].tolist(), image_newline=newline, **how
        )
        return Measured(sum(len(table) for table in packed), grids)

    return rule


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
    return next(tensor for name, tensor in arguments.items() if name.startswith("pixel_values"))


def grids_of(arguments: Tensors) -> Grids:
    """The grids that the processor gives."""
    grids: Grids = next(tensor for name, tensor in arguments.items() if name.endswith("grid_thw")).tolist()
    return grids


def tile_grids(pixels: torch.Tensor, patch: tuple[int, int]) -> Grids:
    """One grid for each tile or frame; pixels: (..., channels, height, width)."""
    *tiles, _, height, width = pixels.shape
    return [[1, height // patch[0], width // patch[1]] for _ in range(math.prod(tiles))]
