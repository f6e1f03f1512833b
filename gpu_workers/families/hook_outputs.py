"""What preprocess_mm_for_encoder gives: grids, row counts, times, and the call that makes rows of it.

The names are SGLang's. ConfigurationError where a hook gives no grids or lengths.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from transformers import PreTrainedModel

from gpu_workers.errors import ConfigurationError
from gpu_workers.families.features import FeatureMethod
from gpu_workers.families.patches import Grids
from shm.messages import ItemAux

logger = logging.getLogger(__name__)

Outputs: TypeAlias = Mapping[str, Any]
# Outputs of each item -> its rows, sound of videos not among them.
Encode: TypeAlias = Callable[[Sequence[Outputs]], list[torch.Tensor]]

_FEATURES: Final = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
_GRIDS: Final = {
    "image": ("image_grid_thw", "image_grid_hws", "grid_thws"),
    "video": ("video_grid_thw", "grid_thws"),
    "audio": ("audio_feature_lens_raw", "audio_feature_lens"),
}
_SOUND_ROWS: Final = "audio_feature_lens"  # where its rows are not as many as its features
_TRACKS: Final = "video_audio_features"
_SEGMENTS: Final = "video_audio_segment_lens_flat"


class RowCounts:
    """How many rows outputs become: merged patches of grids, lengths of sound."""

    def __init__(self, model: PreTrainedModel, modality: str, sample: Outputs, rows: int) -> None:
        """sample became so many rows. ConfigurationError if that does not fit its grids or lengths."""
        self._modality = modality
        self.takes_sound = modality == "video" and hasattr(model, "encode_video_audio")
        patches = _patches(sample, modality)
        if rows < 1 or patches % rows:
            raise ConfigurationError(f"{modality}: {patches} patches became {rows} rows")
        self._patches_of_row = patches // rows
        if _TRACKS in sample and not self.takes_sound:
            logger.warning("videos carry sound, but the model has no encode_video_audio: it is left out")

    def of_media(self, outputs: Outputs) -> int:
        """Rows of pictures, frames or sound."""
        return _patches(outputs, self._modality) // self._patches_of_row

    def of_sound(self, outputs: Outputs) -> int:
        """Rows of a video's sound, 0 without any."""
        return sum(segments_of(outputs) or ()) if self.takes_sound else 0


def grids_of_outputs(outputs: Outputs, modality: str) -> Grids:
    """[[t, h, w], ...] or [[h, w], ...] as the hook gives them; [[n], ...] for sound."""
    names = [name for name in _GRIDS[modality] if outputs.get(name) is not None]
    if not names:
        raise ConfigurationError(
            f"preprocess_mm_for_encoder gives {', '.join(outputs)} for {modality}, and none of "
            f"{', '.join(_GRIDS[modality])}"
        )
    grids: Grids = torch.as_tensor(outputs[names[0]]).tolist()
    return [grid if isinstance(grid, list) else [grid] for grid in grids]


def segments_of(outputs: Outputs) -> list[int] | None:
    """Rows of the video's sound that belong to each of its temporal patches; None without sound."""
    if not outputs.get(_TRACKS):
        return None
    return [int(length) for length in outputs[_SEGMENTS]]


def aux_of(outputs: Outputs, modality: str, *, with_sound: bool) -> ItemAux:
    """Of one item."""
    if modality == "image":
        return ItemAux()
    if modality == "audio":
        return ItemAux(audio_feature_length=sum(math.prod(one) for one in grids_of_outputs(outputs, "audio")))
    segments = segments_of(outputs) if with_sound else None
    lengths = None if segments is None else torch.as_tensor(outputs["video_audio_feature_lens"])
    per_grid = outputs.get("second_per_grid_ts")
    return ItemAux(
        video_timestamps=_floats(outputs.get("video_timestamps")),
        second_per_grid_ts=None if per_grid is None else float(torch.as_tensor(per_grid).flatten()[0]),
        video_audio_feature_length=None if lengths is None else int(lengths.sum()),
        video_audio_segment_lens=segments,
    )


def rows_by_hook(model: PreTrainedModel, method: str) -> Encode:
    """By the model's method of this name: Hugging Face's (..._features) takes outputs by name, one item at a
    time, SGLang's (..._feature) items of all requests together."""
    if method.endswith("features"):
        return lambda items: [_named_rows(model, method, outputs) for outputs in items]
    modality = method.split("_")[1]
    return lambda items: _rows_together(model, method, modality, items)


def _named_rows(model: PreTrainedModel, method: str, outputs: Outputs) -> torch.Tensor:
    features = FeatureMethod(model, method, list(outputs), "preprocess_mm_for_encoder")
    return features.rows(features.arguments(outputs))


def _rows_together(
    model: PreTrainedModel, method: str, modality: str, items: Sequence[Outputs]
) -> list[torch.Tensor]:
    with torch.inference_mode():
        rows = _table(getattr(model, method)([_item(outputs, modality, model.device) for outputs in items]))
    shares = [_patches(outputs, modality) for outputs in items]
    patches_of_row = sum(shares) // len(rows)
    return list(rows.split([share // patches_of_row for share in shares]))


def _table(rows: Any) -> torch.Tensor:
    """One after the other, whether they came as a tensor or a list of them."""
    if isinstance(rows, torch.Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return torch.cat([_table(one) for one in rows])


def _item(outputs: Outputs, modality: str, device: torch.device) -> SimpleNamespace:
    """As SGLang's MultimodalDataItem: `feature`, and everything else by its name."""
    feature = _FEATURES[modality]
    placed = {name: _placed(value, device) for name, value in outputs.items()}
    others = {name: value for name, value in placed.items() if name != feature}
    return SimpleNamespace(modality=modality, feature=placed[feature], **others)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [one.to(device, non_blocking=True) for one in value]
    return value


def _patches(outputs: Outputs, modality: str) -> int:
    """Of all grids; of sound, rows."""
    if modality == "audio" and outputs.get(_SOUND_ROWS) is not None:
        return int(torch.as_tensor(outputs[_SOUND_ROWS]).sum())
    return sum(math.prod(grid) for grid in grids_of_outputs(outputs, modality))


def _floats(times: Any) -> list[float] | None:
    """Flat: a hook gives one list, or one list for each video."""
    if times is None:
        return None
    found: list[float] = torch.as_tensor(times, dtype=torch.float64).flatten().tolist()
    return found
