"""Processed items of the families that are Hugging Face's processors: what their own processor gives, sent as
tensors, becomes the rows of the same item sent raw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import AutoImageProcessor, AutoVideoProcessor

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.options import VisionOptions
from gpu_workers.families.plain_pictures import PictureSource
from gpu_workers.media.image import ImageSize
from shm.errors import ErrorCode, TensorFault
from shm.messages import MediaOptions
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import worker_config
from tests.gpu_workers.reference import (
    encode,
    load_family,
    picture,
    picture_item,
    plan_of,
    png,
    several,
)

PICTURES = (
    "gemma3",
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "mistral3",
    "pixtral",
    "glm4v",
    "glm46v",
    "glm_ocr",
    "kimi_k25",
)
VIDEOS = ("llava_onevision", "internvl", "glm4v", "glm46v", "glm_ocr", "kimi_k25")
SIZE = (150, 100)


def processed(tensors: dict[str, torch.Tensor], modality: str) -> MediaItem:
    return MediaItem(modality, (memoryview(save(tensors)),), "processed")


def tensors_of(outputs: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in outputs.items() if isinstance(tensor, torch.Tensor)}


def picture_tensors(checkpoint: Path, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """As Hugging Face's processor gives them for pictures of these sizes."""
    processor = AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
    return tensors_of(processor(images=[picture(*size) for size in sizes], return_tensors="pt"))


def video_tensors(checkpoint: Path, frames: int) -> dict[str, torch.Tensor]:
    processor = AutoVideoProcessor.from_pretrained(checkpoint)
    video = [picture(*SIZE)] * frames
    return tensors_of(processor(videos=[video], do_sample_frames=False, return_tensors="pt"))


class Loaded:
    """Families and their checkpoints, each loaded when it is first asked for."""

    def __init__(self, checkpoints: TinyCheckpoints) -> None:
        self.checkpoints = checkpoints
        self._families: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        if name not in self._families:
            self._families[name] = load_family(self.checkpoints[name])
        return self._families[name]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoints: TinyCheckpoints) -> Loaded:
    return Loaded(tiny_checkpoints)


@pytest.mark.parametrize("name", PICTURES)
def test_a_processed_picture_has_the_rows_of_the_raw_one(name: str, loaded: Loaded) -> None:
    family, raw = loaded[name], picture_item(png(picture(*SIZE)))
    item = processed(picture_tensors(loaded.checkpoints[name], SIZE), "image")
    plan, expected = family.inspect(item), plan_of(family, raw)
    assert plan is not None
    assert (plan.rows, plan.grids) == (expected.rows, expected.grids)
    assert torch.equal(encode(family, item)[0], encode(family, raw)[0])


@pytest.mark.parametrize("name", PICTURES)
def test_several_processed_pictures_are_one_item(name: str, loaded: Loaded) -> None:
    sizes = [SIZE, (60, 150)]
    item = processed(picture_tensors(loaded.checkpoints[name], *sizes), "image")
    raw = several("image", [picture(*size) for size in sizes])
    assert torch.equal(encode(loaded[name], item)[0], encode(loaded[name], raw)[0])


@pytest.mark.parametrize("name", VIDEOS)
@pytest.mark.parametrize("frames", [2, 6])
def test_a_processed_video_has_the_rows_of_the_raw_one(name: str, frames: int, loaded: Loaded) -> None:
    family, raw = loaded[name], several("video", [picture(*SIZE)] * frames)
    item = processed(video_tensors(loaded.checkpoints[name], frames), "video")
    plan, expected = family.inspect(item), plan_of(family, raw)
    assert plan is not None
    assert (plan.rows, plan.grids) == (expected.rows, expected.grids)
    assert torch.equal(encode(family, item)[0], encode(family, raw)[0])


def test_half_precision_is_taken(loaded: Loaded) -> None:
    tensors = picture_tensors(loaded.checkpoints["gemma3"], SIZE)
    half = processed({"pixel_values": tensors["pixel_values"].half()}, "image")
    [rows] = encode(loaded["gemma3"], half)
    raw = encode(loaded["gemma3"], picture_item(png(picture(*SIZE))))[0]
    assert torch.allclose(rows, raw, atol=0.02)


def refusal(family: Family, item: MediaItem) -> tuple[ErrorCode, TensorFault, int]:
    with pytest.raises(ItemError) as refused:
        encode(family, item)
    return refused.value.code, TensorFault.unpack(refused.value.value), refused.value.limit


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "gemma3",
            {"pixel_values": torch.zeros(1, 3, 56, 55)},
            (ErrorCode.TENSOR_SIZE, TensorFault("pixel_values", 3, 55), 56),
        ),
        (
            "gemma3",
            {"pixel_values": torch.zeros(1, 3, 56, 56, dtype=torch.int64)},
            (ErrorCode.TENSOR_TYPE, TensorFault("pixel_values"), 0),
        ),
        (
            "gemma3",
            {"pixel_values": torch.zeros(3, 56, 56)},
            (ErrorCode.TENSOR_DIMENSIONS, TensorFault("pixel_values", 0, 3), 4),
        ),
        (
            "gemma3",
            {"pixel_values": torch.full((1, 3, 56, 56), torch.inf)},
            (ErrorCode.TENSOR_NOT_FINITE, TensorFault("pixel_values"), 0),
        ),
        (
            "llava_onevision",
            {"image_sizes": torch.tensor([[56, 112]])},
            (ErrorCode.TENSOR_SIZE, TensorFault("pixel_values", 1, 5), 3),
        ),
        (
            "llava_onevision",
            {"image_sizes": torch.tensor([[150, 100], [150, 100]])},
            (ErrorCode.TENSOR_SIZE, TensorFault("image_sizes", 0, 2), 1),
        ),
        (
            "llava_onevision",
            {"batch_num_images": torch.tensor([7])},
            (ErrorCode.TENSOR_VALUE, TensorFault("batch_num_images", 0, 7), 1),
        ),
        (
            "mistral3",
            {"image_sizes": torch.tensor([[9000, 28]])},
            (ErrorCode.TENSOR_VALUE, TensorFault("image_sizes", 0, 9000), 112),
        ),
        (
            "mistral3",
            {"image_sizes": torch.tensor([[-28, 28]])},
            (ErrorCode.TENSOR_VALUE, TensorFault("image_sizes", 0, 0), 1 << 20),
        ),
        (
            "glm4v",
            {"image_grid_thw": torch.tensor([[1, 4, 6]])},
            (ErrorCode.TENSOR_SIZE, TensorFault("pixel_values", 0, 80), 24),
        ),
        (
            "glm4v",
            {"image_grid_thw": torch.tensor([[1, 3, 16]])},
            (ErrorCode.TENSOR_MULTIPLE, TensorFault("image_grid_thw", 1, 3), 2),
        ),
        (
            "kimi_k25",
            {"image_grid_thw": torch.tensor([[24, 2, 2]])},
            (ErrorCode.TENSOR_VALUE, TensorFault("image_grid_thw", 0, 24), 4),
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name_and_limit(
    name: str, change: dict[str, torch.Tensor], expected: tuple[ErrorCode, TensorFault, int], loaded: Loaded
) -> None:
    tensors = picture_tensors(loaded.checkpoints[name], SIZE)
    assert refusal(loaded[name], processed(tensors | change, "image")) == expected


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_sizes_that_the_models_own_packing_refuses_are_the_items_fault(name: str, loaded: Loaded) -> None:
    """A line of one pixel by a million is cropped to nothing."""
    tensors = picture_tensors(loaded.checkpoints[name], (60, 150))
    with pytest.raises(ItemError) as refused:
        encode(loaded[name], processed(tensors | {"image_sizes": torch.tensor([[1, 1 << 20]])}, "image"))
    assert refused.value.code in (ErrorCode.BAD_TENSORS, ErrorCode.TENSOR_SIZE)


def test_a_size_that_the_processor_refuses_tells_nothing_of_the_layout(loaded: Loaded) -> None:
    """Pixtral's processor makes a side of no pixels of a picture four times as wide as high."""
    options = MediaOptions(image={"size": {"longest_edge": 3}})
    config = worker_config(checkpoint=str(loaded.checkpoints["mistral3"]), media_options=options)
    source = PictureSource(config, torch.device("cpu"))
    with pytest.raises(ItemError):
        source.dry_run(ImageSize(1344, 336), VisionOptions())
    small = {"pixel_values": torch.zeros(1, 3, 28, 28)}
    outputs = source.layout(["pixel_values"]).outputs(processed(small, "image").data)
    assert outputs["pixel_values"].shape == (1, 3, 28, 28)


def test_a_missing_tensor_is_named(loaded: Loaded) -> None:
    tensors = picture_tensors(loaded.checkpoints["glm4v"], SIZE)
    del tensors["image_grid_thw"]
    code, fault, _ = refusal(loaded["glm4v"], processed(tensors, "image"))
    assert (code, fault.name) == (ErrorCode.TENSOR_MISSING, "image_grid_thw")


def test_a_video_of_more_frames_than_its_grid_is_refused(loaded: Loaded) -> None:
    tensors = video_tensors(loaded.checkpoints["glm4v"], 6)
    tensors["video_grid_thw"][:, 0] -= 1
    code, fault, _ = refusal(loaded["glm4v"], processed(tensors, "video"))
    assert (code, fault.name) == (ErrorCode.TENSOR_SIZE, "pixel_values_videos")
