"""Decoded pictures to pixel values: on the device, and on one core of the CPU."""

import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from gpu_workers.media.pixels import Frames, TorchPixels, open_pixels
from tests.bench.photographs import photograph
from tests.gpu.scale import Scale

_LEVELS = 255


class Preprocessed(NamedTuple):
    """Pictures a second, until the values are on the device, and how far the two are apart."""

    picture: str
    on_host_per_s: float
    on_device_per_s: float
    largest_difference_levels: float


def measure(scale: Scale, checkpoint: Path) -> list[Preprocessed]:
    """Every picture of the scale. AssertionError if the two differ by more than pixels.py promises."""
    processor = AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
    host = open_pixels(processor, dtype=torch.float32, device=torch.device("cpu"))
    device = TorchPixels(processor, torch.float32, scale.torch_device)
    return [
        _measure(name, _frames(width, height), scale, processor, host.pixel_values, device.pixel_values)
        for name, (width, height) in scale.pictures.items()
    ]


def _measure(
    name: str,
    frames: Frames,
    scale: Scale,
    processor: object,
    on_host: Callable[[Frames, int, int], torch.Tensor],
    on_device: Callable[[Frames, int, int], torch.Tensor],
) -> Preprocessed:
    sides = _target(frames, processor)
    difference = (on_host(frames, *sides) - on_device(frames, *sides).cpu()).abs().max()
    levels = float(difference) * _LEVELS * max(processor.image_std)  # type: ignore[attr-defined]
    assert levels <= 1.01, f"{name}: {levels} levels apart"
    return Preprocessed(
        name,
        _per_second(lambda: on_host(frames, *sides).to(scale.torch_device), scale),
        _per_second(lambda: on_device(frames, *sides), scale),
        levels,
    )


def _frames(width: int, height: int) -> Frames:
    return np.array(Image.open(BytesIO(photograph(width, height, seed=2))).convert("RGB"))[None]


def _target(frames: Frames, processor: object) -> tuple[int, int]:
    height, width = smart_resize(
        frames.shape[1],
        frames.shape[2],
        factor=processor.patch_size * processor.merge_size,  # type: ignore[attr-defined]
        min_pixels=processor.size["shortest_edge"],  # type: ignore[attr-defined]
        max_pixels=processor.size["longest_edge"],  # type: ignore[attr-defined]
    )
    return height, width


def _per_second(call: Callable[[], torch.Tensor], scale: Scale) -> float:
    call()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < scale.figure_seconds / 4:
        call()
        if scale.device != "cpu":
            torch.cuda.synchronize()
        count += 1
    return count / (time.perf_counter() - started)
