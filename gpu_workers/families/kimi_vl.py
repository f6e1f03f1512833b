"""Kimi-VL without its own code: its MoonViT weights fit transformers' classes for Kimi K2.5.

Pictures are scaled, padded and cut as the checkpoint's image processor does it, to the same bits; the tower
computes the same in another order. A video would be other weights: Kimi-VL has none.
"""

import math
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.composed import ComposedFamily, compose
from gpu_workers.families.features import FeatureMethod, joined
from gpu_workers.families.own_pictures import LoadedPictures, refuse_options
from gpu_workers.families.plain_pictures import picture_sample, plan_of
from gpu_workers.families.row_rules import Measured
from gpu_workers.media.image import ImageSize
from gpu_workers.towers import load_towers
from shm.errors import ErrorCode
from shm.messages import WorkerConfig

_GRIDS: Final = "image_grid_thw"
_PATCHES_A_SIDE: Final = 512  # more, and the rotary table of the model's own code ends
# Where Kimi K2.5 has the projector; its tower's names are the same.
_RENAMED: Final = {
    r"^multi_modal_projector\.pre_norm": "model.mm_projector.pre_norm",
    r"^multi_modal_projector\.linear_1": "model.mm_projector.in_proj",
    r"^multi_modal_projector\.linear_2": "model.mm_projector.out_proj",
}


class _Vision(msgspec.Struct, frozen=True):
    """vision_config of config.json; the defaults are the model's own."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    merge_kernel_size: tuple[int, int] = (2, 2)


class _Text(msgspec.Struct, frozen=True):
    hidden_size: int


class _Config(msgspec.Struct, frozen=True):
    text_config: _Text
    vision_config: _Vision = _Vision()


class Preprocessing(msgspec.Struct, frozen=True):
    """preprocessor_config.json; in_token_limit: patches of the largest picture, larger ones shrink."""

    patch_size: int = 14
    pad_input: bool = False
    in_token_limit: int = 4096
    merge_kernel_size: tuple[int, int] = (2, 2)
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)


class Sizes(msgspec.Struct, frozen=True):
    """Of a picture: scaled, in pixels, and its grid after padding, in patches."""

    width: int
    height: int
    grid: tuple[int, int]


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's tower. ConfigurationError for one that cannot work."""
    model = load_towers(
        transformers.Kimi_K25ForConditionalGeneration,
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=False,
        config=_as_kimi_k25(_read(config.checkpoint, "config.json", _Config)),
        key_mapping=_RENAMED,
    )
    return compose(model, model_type, {"image": lambda: _load_pictures(config, model)})


class MoonVitPictures:
    """A composed.Part. The model's own code knows grids of (h, w), and so does the answer."""

    def __init__(self, config: WorkerConfig, model: PreTrainedModel, preprocessing: Preprocessing) -> None:
        self._pictures = LoadedPictures(config)
        self._preprocessing = preprocessing
        self._mean = torch.tensor(preprocessing.image_mean)[:, None, None]
        self._std = torch.tensor(preprocessing.image_std)[:, None, None]
        self._method = FeatureMethod(model, "get_image_features", ["pixel_values", _GRIDS], "Kimi-VL's")
        self._dim = int(model.config.text_config.hidden_size)

    @property
    def dim(self) -> int:
        """The language model's width."""
        return self._dim

    def sample(self) -> MediaItem:
        """A gray square."""
        return picture_sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """From the headers."""
        return self.measure(item)

    def measure(self, item: MediaItem) -> ItemPlan:
        """From the headers."""
        if item.kind == "processed":
            raise ItemError(ErrorCode.KIND_UNSUPPORTED)
        refuse_options(item)
        sizes = [self._pictures.size(file) for file in item.files]
        return plan_of([self._measured(size) for size in sizes], sizes[0])

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """Decoded and cut into patches."""
        pictures = [self._arguments(self._pictures.picture(file)) for file in item.files]
        return Prepared(item.modality, plan, dict(joined(pictures)))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """All pictures by one call."""
        return list(self._method.encode_together(batch))

    def _measured(self, size: ImageSize) -> Measured:
        high, wide = scaled_sizes(size.width, size.height, self._preprocessing).grid
        down, across = self._preprocessing.merge_kernel_size
        return Measured((high // down) * (wide // across), [[high, wide]])

    def _arguments(self, picture: Image.Image) -> dict[str, torch.Tensor]:
        sizes = scaled_sizes(*picture.size, self._preprocessing)
        if picture.size != (sizes.width, sizes.height):
            picture = picture.resize((sizes.width, sizes.height), Image.Resampling.BICUBIC)
        (high, wide), side = sizes.grid, self._preprocessing.patch_size
        padded = np.zeros((high * side, wide * side, 3), np.uint8)
        padded[: sizes.height, : sizes.width] = np.asarray(picture)
        pixels = (torch.from_numpy(padded).permute(2, 0, 1) / 255 - self._mean) / self._std
        patches = pixels.reshape(3, high, side, wide, side).permute(1, 3, 0, 2, 4)
        return {
            "pixel_values": patches.reshape(high * wide, 3, side, side),
            _GRIDS: torch.tensor([[1, high, wide]]),
        }


def scaled_sizes(width: int, height: int, preprocessing: Preprocessing) -> Sizes:
    """How large a picture of these sides becomes. ItemError if one side has too many patches."""
    side = preprocessing.patch_size
    patches = (width // side) * (height // side)
    if patches > preprocessing.in_token_limit:
        scale = math.sqrt(preprocessing.in_token_limit / patches)
        width, height = int(width * scale), int(height * scale)
    down, across = (merged * side for merged in preprocessing.merge_kernel_size)
    grid = (-(-height // down) * down // side, -(-width // across) * across // side)
    if max(grid) >= _PATCHES_A_SIDE:
        raise ItemError(ErrorCode.UNSUPPORTED_FORMAT)
    return Sizes(width, height, grid)


def _load_pictures(config: WorkerConfig, model: PreTrainedModel) -> MoonVitPictures:
    """OSError if the checkpoint has no preprocessor_config.json."""
    preprocessing = _read(config.checkpoint, "preprocessor_config.json", Preprocessing)
    if not preprocessing.pad_input:
        raise ConfigurationError("a checkpoint that crops its pictures (pad_input) needs --trust-remote-code")
    return MoonVitPictures(config, model, preprocessing)


def _read(checkpoint: str, name: str, kind: Any) -> Any:
    """ConfigurationError for values of wrong types."""
    try:
        return msgspec.json.decode(Path(checkpoint, name).read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{checkpoint}/{name}: {error}") from None


def _as_kimi_k25(described: _Config) -> transformers.PreTrainedConfig:
    """Of the language model only the width counts."""
    vision = described.vision_config
    return transformers.Kimi_K25Config(
        vision_config={
            "patch_size": vision.patch_size,
            "pos_emb_height": vision.init_pos_emb_height,
            "pos_emb_width": vision.init_pos_emb_width,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "merge_kernel_size": vision.merge_kernel_size,
        },
        text_config={
            "model_type": "deepseek_v3",
            "hidden_size": described.text_config.hidden_size,
            "num_hidden_layers": 1,
            "vocab_size": 8,
        },
        projection_hidden_size=vision.hidden_size,
    )
