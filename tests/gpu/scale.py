"""How large everything is: on a CUDA device, and in the rehearsal that runs every step on the CPU."""

from dataclasses import dataclass
from typing import Any, Final

import torch

from gpu_workers.checkpoints.recipe import Size

THUMBNAIL: Final = "224x224"


@dataclass(frozen=True)
class TowerShape:
    """A tower to build: a recipe of gpu_workers.checkpoints.qwen_vl at this size, with these changes."""

    name: str
    recipe: str
    size: Size
    vision: dict[str, Any]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # a worker is started for each


@dataclass(frozen=True)
class Scale:
    """One machine's worth of work. Sides are width x height in pixels, times are per figure."""

    device: str
    towers: tuple[TowerShape, ...]
    pictures: dict[str, tuple[int, int]]
    figure_seconds: float
    max_pictures: int
    copy_bytes: int
    hidden_forwards: int
    matrix_side: int
    segment_bytes: int
    arena_bytes: int
    prepare_threads: int
    in_flight: int  # a quarter of the ring's slots at most, as control keeps it
    max_batch_items: int
    max_batch_patches: int

    @property
    def torch_device(self) -> torch.device:
        """Where the towers are."""
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the towers whose speed is measured."""
        return torch.bfloat16 if self.device != "cpu" else torch.float32


# The vision_config of Qwen2.5-VL-7B-Instruct and of Qwen3-VL-8B-Instruct.
_REAL: Final = (
    TowerShape(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        Size(32, 1280, 3420, 16, 3584, language_layers=1),
        {"fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112},
    ),
    TowerShape(
        "Qwen3-VL-8B",
        "qwen3_vl",
        Size(27, 1152, 4304, 16, 4096, language_layers=1),
        {"deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 2304},
    ),
)
_TINY: Final = (
    TowerShape(
        "tiny Qwen2.5-VL",
        "qwen2_5_vl",
        Size(4, 32, 64, 2, 64),
        {"fullatt_block_indexes": [1, 3]},
        (torch.float32,),
    ),
    TowerShape("tiny Qwen3-VL", "qwen3_vl", Size(4, 32, 64, 2, 64), {"deepstack_visual_indexes": [0, 1, 2]}),
)


def cuda_scale(cores: int) -> Scale:
    """For a device of some tens of gigabytes."""
    return Scale(
        device="cuda:0",
        towers=_REAL,
        pictures={THUMBNAIL: (224, 224), "640x480": (640, 480), "1080p": (1920, 1080)},
        figure_seconds=4,
        max_pictures=2048,
        copy_bytes=256 << 20,
        hidden_forwards=50,
        matrix_side=8192,
        segment_bytes=4 << 30,
        arena_bytes=512 << 20,
        prepare_threads=max(2, cores - 2),
        in_flight=64,
        max_batch_items=32,
        max_batch_patches=65536,
    )


def rehearsal_scale() -> Scale:
    """A few seconds of CPU for each step."""
    return Scale(
        device="cpu",
        towers=_TINY,
        pictures={THUMBNAIL: (224, 224), "320x240": (320, 240)},
        figure_seconds=0.2,
        max_pictures=8,
        copy_bytes=4 << 20,
        hidden_forwards=4,
        matrix_side=256,
        segment_bytes=32 << 20,
        arena_bytes=8 << 20,
        prepare_threads=2,
        in_flight=8,
        max_batch_items=4,
        max_batch_patches=16384,
    )
