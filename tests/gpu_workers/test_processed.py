"""Already processed items: what fits is encoded as its picture would be, everything else is refused."""

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.processed import TensorFile
from shm.errors import ErrorCode, TensorFault
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import encode, load_family, picture, picture_item, plan_of, png

WIDTH = 1176


def item_of(data: bytes, modality: str = "image") -> MediaItem:
    return MediaItem(modality, (memoryview(data),), "processed")


def file_of(header: dict[str, Any], content: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + content


@pytest.fixture(scope="module")
def family(tiny_checkpoints: TinyCheckpoints) -> Family:
    return load_family(tiny_checkpoints["qwen2_vl"])


@pytest.mark.parametrize(
    ("modality", "names"),
    [
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ],
)
def test_processed_pixels_give_the_rows_of_their_picture(
    family: Family, modality: str, names: tuple[str, str]
) -> None:
    item = picture_item(png(picture(150, 100)))
    plan = plan_of(family, item)
    features = family.preprocess(item, plan).features
    tensors = {names[0]: features["pixel_values"], names[1]: features["image_grid_thw"]}
    processed = item_of(save(tensors), modality)
    assert plan_of(family, processed).grids == plan.grids
    assert torch.equal(encode(family, processed)[0], encode(family, item)[0])


def good() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(16, WIDTH), "image_grid_thw": torch.tensor([[1, 4, 4]])}


@pytest.mark.parametrize(
    ("change", "code", "found", "limit"),
    [
        ({"pixel_values": torch.zeros(15, WIDTH)}, ErrorCode.TENSOR_SIZE, 15, 16),
        ({"pixel_values": torch.zeros(16, WIDTH - 1)}, ErrorCode.TENSOR_SIZE, WIDTH - 1, WIDTH),
        ({"pixel_values": torch.zeros(16, WIDTH, dtype=torch.int64)}, ErrorCode.TENSOR_TYPE, 0, 0),
        ({"pixel_values": torch.zeros(16 * WIDTH)}, ErrorCode.TENSOR_DIMENSIONS, 1, 2),
        ({"pixel_values": torch.full((16, WIDTH), float("nan"))}, ErrorCode.TENSOR_NOT_FINITE, 0, 0),
        ({"image_grid_thw": torch.tensor([[1, 16, 1]])}, ErrorCode.TENSOR_MULTIPLE, 1, 2),
        ({"image_grid_thw": torch.tensor([[-1, -4, 4]])}, ErrorCode.TENSOR_VALUE, 0, 1 << 20),
        ({"image_grid_thw": torch.tensor([[1 << 44, 4, 4]])}, ErrorCode.TENSOR_VALUE, 1 << 44, 1 << 20),
        ({"image_grid_thw": torch.ones(5000, 3).int()}, ErrorCode.TENSOR_SIZE, 5000, 4096),
        ({"image_grid_thw": torch.tensor([1, 4, 4])}, ErrorCode.TENSOR_DIMENSIONS, 1, 2),
        ({"image_grid_thw": torch.tensor([[1.0, 4.0, 4.0]])}, ErrorCode.TENSOR_TYPE, 0, 1),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    family: Family, change: dict[str, torch.Tensor], code: ErrorCode, found: int, limit: int
) -> None:
    assert plan_of(family, item_of(save(good()))).rows == 4
    with pytest.raises(ItemError) as refusal:
        encode(family, item_of(save(good() | change)))
    fault = TensorFault.unpack(refusal.value.value)
    [name] = change
    assert (refusal.value.code, fault.name, fault.found, refusal.value.limit) == (code, name, found, limit)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
def test_a_missing_tensor_is_refused(family: Family, name: str) -> None:
    tensors = good()
    del tensors[name]
    with pytest.raises(ItemError) as refusal:
        plan_of(family, item_of(save(tensors)))
    assert refusal.value.code is ErrorCode.TENSOR_MISSING
    assert TensorFault.unpack(refusal.value.value).name == name


ENTRY = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        file_of({"x": {**ENTRY, "data_offsets": [0, 16]}}, bytes(8)),
        file_of({"x": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
        file_of({"x": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        file_of({"x": {**ENTRY, "shape": [1 << 40, 1 << 40]}}, bytes(8)),
        file_of({"x": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
        file_of({"x": {**ENTRY, "shape": [1, 3]}}, bytes(8)),
        file_of({"x": {**ENTRY, "dtype": "U9"}}, bytes(8)),
        file_of({"x": {**ENTRY, "shape": "wide"}}, bytes(8)),
        file_of({"x": None}, bytes(8)),
    ],
)
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(ItemError) as refusal:
        TensorFile(memoryview(data))
    assert refusal.value.code is ErrorCode.BAD_TENSORS


def test_a_files_metadata_is_not_a_tensor() -> None:
    content = np.arange(2, dtype="<f4").tobytes()
    tensors = TensorFile(memoryview(file_of({"__metadata__": {"by": "hand"}, "x": ENTRY}, content)))
    assert tensors.floats("x", (None, 2)).tolist() == [[0.0, 1.0]]
