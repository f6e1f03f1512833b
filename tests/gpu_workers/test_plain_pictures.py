"""Pictures of the families without code of their own against Hugging Face's get_image_features."""

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from PIL import Image

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family
from shm.errors import ErrorCode
from shm.layout import CompletionKind, Dtype
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import Harness
from tests.gpu_workers.reference import (
    encode,
    load_family,
    picture,
    picture_item,
    plan_of,
    png,
    several,
    whole_model,
)

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

# What each model's get_image_features takes of its processor's outputs.
ARGUMENTS: Final = {
    "gemma3": ("pixel_values",),
    "llava": ("pixel_values",),
    "llava_next": ("pixel_values", "image_sizes"),
    "llava_onevision": ("pixel_values", "image_sizes", "batch_num_images"),
    "internvl": ("pixel_values",),
    "mistral3": ("pixel_values", "image_sizes"),
    "pixtral": ("pixel_values", "image_sizes"),
    "glm4v": ("pixel_values", "image_grid_thw"),
    "glm4v_moe": ("pixel_values", "image_grid_thw"),
    "glm46v": ("pixel_values", "image_grid_thw"),
    "glm_ocr": ("pixel_values", "image_grid_thw"),
    "kimi_k25": ("pixel_values", "image_grid_thw"),
}
SIZES: Final = [(224, 336), (150, 100), (30, 50), (60, 300)]


class Reference:
    """The whole Hugging Face model and its processor."""

    def __init__(self, checkpoint: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = whole_model(checkpoint, family, dtype)
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
        self.arguments = ARGUMENTS[family]

    def inputs(self, image: Image.Image) -> Any:
        """What the processor gives for one picture."""
        return self.processor(images=[image], return_tensors="pt")

    def features(self, image: Image.Image) -> torch.Tensor:
        """(rows, dim)."""
        inputs = self.inputs(image).to(self.model.dtype)
        with torch.no_grad():
            output = self.model.get_image_features(**{name: inputs[name] for name in self.arguments})
        return torch.cat(list(output.pooler_output))


@pytest.fixture(scope="module", params=ARGUMENTS)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(checkpoint: Path, family_name: str) -> Reference:
    return Reference(checkpoint, family_name)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_single_picture_equals_hugging_face_exactly(
    family: Family, reference: Reference, height: int, width: int
) -> None:
    image = picture(height, width)
    [rows] = encode(family, picture_item(png(image)))
    assert torch.equal(rows, reference.features(image))


@pytest.mark.parametrize(("height", "width"), [(30, 50), (60, 300), (3, 50), (270, 200)])
def test_the_header_tells_what_the_processor_makes_of_the_pixels(
    family: Family, reference: Reference, height: int, width: int
) -> None:
    image = picture(height, width)
    plan = family.inspect(picture_item(png(image)))
    inputs = reference.inputs(image)
    assert plan is not None
    assert (plan.width, plan.height) == (width, height)
    assert plan.rows == len(reference.features(image))
    assert plan.grids == grids_of(inputs)
    assert plan.cost_patches == sum(tall * wide for _, tall, wide in plan.grids)


def grids_of(inputs: Any) -> list[list[int]]:
    """In patches of 14: the processor's own, or of the sizes it tells, or of its tiles."""
    if "image_grid_thw" in inputs:
        grids: list[list[int]] = inputs["image_grid_thw"].tolist()
        return grids
    pixels = inputs["pixel_values"]
    tiles = pixels.flatten(0, -4)
    return [[1, tile.shape[-2] // 14, tile.shape[-1] // 14] for tile in tiles]


def test_pictures_of_different_sizes_share_a_forward_and_keep_their_rows(family: Family) -> None:
    items = [picture_item(png(picture(*size))) for size in [*SIZES, (100, 90), (33, 33), (200, 64)]]
    alone = [encode(family, item)[0] for item in items]
    prepared = [family.preprocess(item, plan_of(family, item)) for item in items]
    assert len({one.batch_key for one in prepared}) == 1
    for rows, single in zip(encode(family, *items), alone, strict=True):
        torch.testing.assert_close(rows, single, rtol=1e-5, atol=2e-6)


def test_several_pictures_of_one_item_follow_each_other(family: Family, reference: Reference) -> None:
    images = [picture(150, 100), picture(60, 300)]
    item = several("image", images)
    plan = plan_of(family, item)
    assert plan.grids == [grid for image in images for grid in grids_of(reference.inputs(image))]
    expected = torch.cat([reference.features(image) for image in images])
    torch.testing.assert_close(encode(family, item)[0], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["llava_onevision", "mistral3", "kimi_k25"])
def test_half_precision_equals_hugging_face_exactly(name: str, tiny_checkpoints: TinyCheckpoints) -> None:
    checkpoint = tiny_checkpoints[name]
    family = load_family(checkpoint, "bfloat16")
    assert family.info().dtype is Dtype.BFLOAT16
    reference = Reference(checkpoint, name, torch.bfloat16)
    image = picture(150, 100)
    assert torch.equal(encode(family, picture_item(png(image)))[0], reference.features(image))


def test_only_towers_and_projectors_are_loaded(family: Family, reference: Reference) -> None:
    whole = sum(parameter.nbytes for parameter in reference.model.parameters())
    language = sum(parameter.nbytes for parameter in reference.model.model.language_model.parameters())
    assert family.info().tower_bytes < whole - language + 200_000


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_limits_of_pixels_are_refused_where_the_processor_has_none(
    name: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    family = load_family(tiny_checkpoints[name])
    with pytest.raises(ItemError) as refusal:
        family.inspect(picture_item(png(picture(30, 50)), max_pixels=100_000))
    assert refusal.value.code is ErrorCode.BAD_OPTION


def test_limits_of_pixels_are_kept_where_the_processor_has_them(tiny_checkpoints: TinyCheckpoints) -> None:
    family = load_family(tiny_checkpoints["glm4v"])
    large, small = (
        plan_of(family, picture_item(png(picture(448, 448)), **options))
        for options in ({}, {"max_pixels": 50_000})
    )
    assert small.rows < large.rows


def test_a_picture_of_a_single_row_is_encoded(tiny_checkpoints: TinyCheckpoints) -> None:
    """Mistral 3's own method fails for one row, so beside another picture it is right and alone it fails."""
    family = load_family(tiny_checkpoints["mistral3"])
    small, other = picture_item(png(picture(20, 20))), picture_item(png(picture(100, 100)))
    alone, [beside, _] = encode(family, small)[0], encode(family, small, other)
    assert len(alone) == 1
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=2e-6)


def test_pixtrals_sides_are_multiples_of_what_becomes_one_row(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """The image processor's file of published checkpoints names the patch alone; the processor around it
    multiplies by the merge."""
    checkpoint = tmp_path / "mistral3"
    shutil.copytree(tiny_checkpoints["mistral3"], checkpoint)
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = checkpoint / name
        if path.exists():
            path.write_text(path.read_text().replace("28", "14"))
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    assert processor.image_processor.patch_size == {"height": 14, "width": 14}
    image = picture(70, 42)
    inputs = processor(text="[IMG]", images=image, return_tensors="pt")
    expected = whole_model(checkpoint, "mistral3").get_image_features(
        inputs["pixel_values"], image_sizes=inputs["image_sizes"]
    )
    [rows] = encode(load_family(checkpoint), picture_item(png(image)))
    assert torch.equal(rows, torch.cat(list(expected.pooler_output)))


def test_options_of_the_daemon_reach_the_processor(tiny_checkpoints: TinyCheckpoints) -> None:
    family = load_family(tiny_checkpoints["internvl"], image={"crop_to_patches": False})
    assert plan_of(family, picture_item(png(picture(224, 336)))).grids == [[1, 4, 4]]


def test_pan_and_scan_makes_several_tiles_of_one_picture(tiny_checkpoints: TinyCheckpoints) -> None:
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 32,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    family = load_family(tiny_checkpoints["gemma3"], image=options)
    item = picture_item(png(picture(60, 300)))
    assert plan_of(family, item).rows == 5 * 4
    assert len(encode(family, item)[0]) == 5 * 4


def test_an_aspect_ratio_over_200_is_refused(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        family.inspect(picture_item(png(picture(1, 201))))
    assert refusal.value.code is ErrorCode.ASPECT_RATIO


def test_a_worker_process_serves_such_a_family(tiny_checkpoints: TinyCheckpoints) -> None:
    checkpoint = tiny_checkpoints["llava_onevision"]
    image = picture(150, 100)
    with Harness(tower="auto", checkpoint=str(checkpoint)) as worker:
        end = worker.outcome(bytes(png(image))).end
        assert end.kind is CompletionKind.READY
        rows = torch.from_numpy(worker.rows(end))
        info = worker.control.info()
    assert (info.model_type, info.modalities) == ("llava_onevision", ["image", "video"])
    assert torch.equal(rows, Reference(checkpoint, "llava_onevision").features(image))
