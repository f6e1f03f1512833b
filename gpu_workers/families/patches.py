"""What pictures and videos of the Qwen families share: towers that take patches of any number of grids.

A grid is (t, h, w) in patches; merge_size x merge_size patches of one t become one row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from transformers import PreTrainedModel

from gpu_workers.errors import ItemError
from gpu_workers.families.base import MediaItem, Prepared, Rows
from gpu_workers.families.composed import tensors_of
from gpu_workers.families.processed import TensorFile, no_multiple, wrong_size
from shm.errors import ErrorCode

Grids: TypeAlias = list[list[int]]

_PIXEL_CHANNELS: Final = 3


def patch_count(grids: Grids) -> int:
    """Patches of all grids together."""
    return sum(math.prod(grid) for grid in grids)


def patch_width(processor: Any) -> int:
    """Numbers of one patch, as the processor lays it out."""
    return int(_PIXEL_CHANNELS * processor.temporal_patch_size * processor.patch_size**2)


def row_width(vision_config: Any) -> int:
    """Elements of a row: Qwen2-VL calls its merger's output hidden_size, the others out_hidden_size.

    DeepStack levels follow the main embedding on the last dimension.
    """
    width: int = getattr(vision_config, "out_hidden_size", vision_config.hidden_size)
    return width * (1 + len(getattr(vision_config, "deepstack_visual_indexes", None) or ()))


def check_aspect_ratio(width: int, height: int, limit: int) -> None:
    """ItemError(ASPECT_RATIO) if the longer side is more than limit times the shorter."""
    ratio = max(width, height) / min(width, height)
    if ratio > limit:
        raise ItemError(ErrorCode.ASPECT_RATIO, math.ceil(ratio), limit)


def processed_grids(item: MediaItem, names: tuple[str, str], processor: Any) -> Grids:
    """The grids of an already processed item; names: of its pixels and of its grids. ItemError."""
    pixels, grid_name = names
    tensors = TensorFile(item.data)
    grids = tensors.grids(grid_name)
    check_merges(grids, grid_name, processor.merge_size)
    patches, _ = tensors.float_sizes(pixels, (None, patch_width(processor)))
    if patch_count(grids) != patches:
        raise wrong_size(pixels, 0, patches, patch_count(grids))
    return grids


def check_merges(grids: Grids, name: str, merge_size: int) -> None:
    """ItemError for a grid whose height or width is no multiple of merge_size; name: of the grids' tensor."""
    for _, height, width in grids:
        if height % merge_size or width % merge_size:
            raise no_multiple(name, 1, height if height % merge_size else width, merge_size)


def processed_pixels(item: MediaItem, names: tuple[str, str], width: int) -> dict[str, torch.Tensor]:
    """Both tensors of an already processed item, checked. ItemError."""
    pixels, grid_name = names
    tensors = TensorFile(item.data)
    return {
        pixels: tensors.floats(pixels, (None, width)),
        grid_name: torch.tensor(tensors.grids(grid_name)),
    }


def encode_patches(
    model: PreTrainedModel,
    get_features: Callable[..., Any],
    batch: Sequence[Prepared],
    names: tuple[str, str],
) -> list[Rows]:
    """get_features on all items together; rows of each item, DeepStack levels behind the main columns."""
    with torch.inference_mode():
        arguments = {name: _together(model, batch, name) for name in names}
        output = get_features(**arguments)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        of_grids = iter([torch.cat(columns, dim=-1) for columns in zip(*levels, strict=True)])
        return [_joined([next(of_grids) for _ in prepared.plan.grids]) for prepared in batch]


def _together(model: PreTrainedModel, batch: Sequence[Prepared], name: str) -> torch.Tensor:
    """Moved first: some may be there already (--preprocess-device), and some not (processed items)."""
    tensors = tensors_of(batch, name)
    return torch.cat([tensor.to(model.device, non_blocking=True) for tensor in tensors])


def _joined(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
