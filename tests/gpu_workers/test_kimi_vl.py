"""Kimi-VL in transformers' classes for Kimi K2.5, against the model and processor of its own code."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from PIL import Image

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.kimi_vl import Preprocessing, scaled_sizes
from shm.errors import ErrorCode
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import (
    encode,
    load_family,
    picture,
    picture_item,
    plan_of,
    png,
    several,
)

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

SIZES: Final = [(224, 336), (150, 100), (30, 50), (60, 300), (56, 56), (28, 28), (100, 150), (9, 57)]
ROUNDING: Final = 1e-6  # the largest row is about 0.1


class WholeKimi:
    """The whole model and its processor, both by the checkpoint's code."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=True)

    def inputs(self, image: Image.Image) -> Any:
        return self.processor(images=[image], return_tensors="pt")

    def rows(self, image: Image.Image) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self.model._extract_image_features(**self.inputs(image))
        return rows


def small_limit(checkpoint: Path, directory: Path, **changes: Any) -> Path:
    """A copy whose processor's options are changed."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of more than 200 patches shrink."""
    return small_limit(tiny_checkpoints["kimi_vl"], tmp_path_factory.mktemp("kimi_vl"), in_token_limit=200)


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(checkpoint)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> WholeKimi:
    return WholeKimi(checkpoint)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_are_the_own_processors_bits_and_rows_its_models(
    family: Family, whole: WholeKimi, height: int, width: int
) -> None:
    image = picture(height, width)
    item = picture_item(png(image))
    plan = family.inspect(item)
    assert plan is not None  # from the header
    inputs = whole.inputs(image)
    [grid] = inputs["image_grid_hws"].tolist()
    assert plan.grids == [grid]
    assert plan.rows == (grid[0] // 2) * (grid[1] // 2)
    assert torch.equal(family.preprocess(item, plan).features["pixel_values"], inputs["pixel_values"])
    assert torch.allclose(encode(family, item)[0], whole.rows(image), rtol=0, atol=ROUNDING)


def test_eight_pictures_of_different_sizes_get_their_own_rows(family: Family, whole: WholeKimi) -> None:
    images = [picture(*size) for size in SIZES]
    items = [picture_item(png(image)) for image in images]
    for rows, image in zip(encode(family, *items), images, strict=True):
        assert torch.allclose(rows, whole.rows(image), rtol=0, atol=ROUNDING)


def test_several_pictures_of_one_item_have_a_grid_each(family: Family, whole: WholeKimi) -> None:
    images = [picture(56, 56), picture(60, 150)]
    item = several("image", images)
    assert plan_of(family, item).grids == [[4, 4], [6, 12]]
    expected = torch.cat([whole.rows(image) for image in images])
    assert torch.allclose(encode(family, item)[0], expected, rtol=0, atol=ROUNDING)


def test_the_tower_alone_is_loaded_in_the_type_that_is_asked_for(checkpoint: Path, family: Family) -> None:
    half = load_family(checkpoint, dtype="bfloat16")
    [rows] = encode(half, picture_item(png(picture(56, 84))))
    assert rows.dtype is torch.bfloat16
    whole_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert half.info().tower_bytes < family.info().tower_bytes < whole_bytes


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (picture_item(png(picture(56, 56)), max_pixels=100), ErrorCode.BAD_OPTION),
        (MediaItem("image", (png(picture(56, 56)),), "processed"), ErrorCode.KIND_UNSUPPORTED),
        (picture_item(memoryview(b"no picture")), ErrorCode.NOT_AN_IMAGE),
        (MediaItem("video", (memoryview(b"any"),)), ErrorCode.MODALITY_UNSUPPORTED),
    ],
)
def test_what_it_does_not_take_is_refused_from_the_header(
    family: Family, item: MediaItem, code: ErrorCode
) -> None:
    with pytest.raises(ItemError) as refused:
        family.inspect(item)
    assert refused.value.code is code


def test_a_side_may_have_fewer_than_512_patches() -> None:
    preprocessing = Preprocessing(in_token_limit=1 << 20)
    assert scaled_sizes(510 * 14, 14, preprocessing).grid == (2, 510)
    with pytest.raises(ItemError):
        scaled_sizes(511 * 14, 14, preprocessing)


def test_a_checkpoint_that_crops_needs_its_own_code(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"pad_input.*--trust-remote-code"):
        load_family(small_limit(checkpoint, tmp_path, pad_input=False))


def test_a_checkpoint_of_wrong_types_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"preprocessor_config.json: Expected `int`.*patch_size"):
        load_family(small_limit(checkpoint, tmp_path, patch_size="large"))
