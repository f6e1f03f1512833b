"""Pictures of the Qwen families against Hugging Face's own get_image_features on the same pictures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import Family
from shm.errors import ErrorCode
from shm.layout import CompletionKind, Dtype
from tests.gpu_workers.conftest import FAMILIES, VISION_FAMILIES, TinyCheckpoints
from tests.gpu_workers.harness import Harness
from tests.gpu_workers.reference import (
    assert_as_close,
    encode,
    load_family,
    picture,
    picture_item,
    plan_of,
    png,
    rows_of_vision,
    several,
    whole_model,
)
from tests.gpu_workers.test_image_cases import FAMILY_DECIDES, image_cases, read

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

SIZES = [(224, 336), (150, 100), (3, 50), (448, 448), (1, 1)]
BATCH_SIZES = [*SIZES, (64, 64), (30, 200), (100, 150)]


class Reference:
    """The whole Hugging Face model and its processor."""

    def __init__(self, checkpoint: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = whole_model(checkpoint, family, dtype)
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")

    def features(self, *images: Image.Image, **options: Any) -> torch.Tensor:
        """Rows with DeepStack levels behind them."""
        inputs = self.processor(images=list(images), return_tensors="pt", **options)
        with torch.no_grad():
            return rows_of_vision(self.model.get_image_features(**inputs))

    def grid(self, image: Image.Image) -> list[list[int]]:
        """image_grid_thw."""
        grid: list[list[int]] = self.processor(images=[image], return_tensors="pt")["image_grid_thw"].tolist()
        return grid


@pytest.fixture(scope="module", params=VISION_FAMILIES)
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
    assert rows.dtype is torch.float32
    assert torch.equal(rows, reference.features(image))


@pytest.mark.parametrize(("height", "width"), [*SIZES, (2048, 16), (27, 257), (16, 2048), (540, 960)])
def test_the_plan_from_the_header_is_the_processors_grid(
    family: Family, reference: Reference, height: int, width: int
) -> None:
    image = picture(height, width)
    plan = plan_of(family, picture_item(png(image)))
    assert plan.grids == reference.grid(image)
    assert (plan.width, plan.height) == (width, height)
    assert plan.rows == plan.cost_patches // 4


def test_a_batch_is_as_close_to_the_truth_as_hugging_face_is(
    family: Family, reference: Reference, checkpoint: Path, family_name: str
) -> None:
    truth = Reference(checkpoint, family_name, torch.float64)
    images = [picture(*size) for size in BATCH_SIZES]
    for rows, image in zip(
        encode(family, *[picture_item(png(image)) for image in images]), images, strict=True
    ):
        assert_as_close(rows, reference.features(image), truth.features(image))


def test_bfloat16_is_as_close_to_the_truth_as_hugging_face_is(checkpoint: Path, family_name: str) -> None:
    family = load_family(checkpoint, "bfloat16")
    half = Reference(checkpoint, family_name, torch.bfloat16)
    truth = Reference(checkpoint, family_name, torch.float64)
    assert family.info().dtype is Dtype.BFLOAT16
    images = [picture(*size) for size in SIZES]
    [alone] = encode(family, picture_item(png(images[0])))
    assert torch.equal(alone, half.features(images[0]))
    for rows, image in zip(
        encode(family, *[picture_item(png(image)) for image in images]), images, strict=True
    ):
        assert_as_close(rows, half.features(image), truth.features(image))


def test_deepstack_levels_make_the_rows_wider(tiny_checkpoints: TinyCheckpoints) -> None:
    widths = {name: load_family(tiny_checkpoints[name]).info().dim for name in FAMILIES}
    assert widths == {"qwen2_vl": 64, "qwen2_5_vl": 64, "qwen3_vl": 64 * (1 + 3)}


def test_an_aspect_ratio_over_200_is_refused_with_both_numbers(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, picture_item(png(picture(1, 201))))
    error = refusal.value
    assert (error.code, error.value, error.limit) == (ErrorCode.ASPECT_RATIO, 201, 200)
    assert plan_of(family, picture_item(png(picture(1, 200)))).rows > 0


def accepted_cases() -> list[Any]:
    names = ("qwen2_vl", "qwen3_vl")
    return [
        pytest.param(case, name, id=f"{case['id']}-{name}")
        for case in image_cases()
        if case["expect"]["verdict"] == "accept"
        for name in names
        if name in case["expect"]["facts"].get("hf", {})
    ]


@pytest.mark.parametrize(("case", "name"), accepted_cases())
def test_the_recorded_grids_and_pixel_values_of_the_cases_hold(
    case: dict[str, Any], name: str, loaded: Callable[[str], Family]
) -> None:
    facts = case["expect"]["facts"]["hf"][name]
    family = loaded(name)
    plan = plan_of(family, picture_item(read(case)))
    assert plan.grids == [facts["grid_thw"]]
    assert plan.rows == facts["tokens"]
    recorded = facts["torchvision_backend"]
    values = family.preprocess(picture_item(read(case)), plan).features["pixel_values"]
    assert isinstance(values, torch.Tensor)
    assert list(values.shape) == recorded["pixel_values_shape"]
    tolerance = 5 * max(pixel["tol"] for pixel in case["expect"]["facts"]["rgb"]["pixels"]) / 255 + 1e-3
    for row, column, value in recorded["samples"]:
        assert abs(float(values[row, column]) - value) <= tolerance


@pytest.fixture(scope="module")
def loaded(tiny_checkpoints: TinyCheckpoints) -> Callable[[str], Family]:
    families = {name: load_family(tiny_checkpoints[name]) for name in ("qwen2_vl", "qwen3_vl")}
    return families.__getitem__


@pytest.mark.parametrize("case", [case for case in image_cases() if case["id"] in FAMILY_DECIDES])
def test_cases_that_these_families_refuse_are_refused(
    case: dict[str, Any], loaded: Callable[[str], Family]
) -> None:
    for name in case["families"]:
        if name in ("qwen2_vl", "qwen3_vl"):
            with pytest.raises(ItemError):
                plan_of(loaded(name), picture_item(read(case)))


def test_several_pictures_in_one_item_have_a_grid_each(family: Family, reference: Reference) -> None:
    images = [picture(150, 100), picture(64, 64)]
    item = several("image", images)
    plan = plan_of(family, item)
    assert plan.grids == [*reference.grid(images[0]), *reference.grid(images[1])]
    alone, together = encode(family, picture_item(png(images[1]))), encode(family, item, item)
    assert torch.allclose(together[0], reference.features(*images), rtol=1e-4, atol=1e-6)
    assert torch.allclose(together[1][-len(alone[0]) :], alone[0], rtol=1e-4, atol=1e-6)


def test_an_items_own_pixel_limits_are_the_processors(family: Family, reference: Reference) -> None:
    image = picture(300, 500)
    limits = {"min_pixels": 20_000, "max_pixels": 40_000}
    [rows] = encode(family, picture_item(png(image), **limits))
    size = {"shortest_edge": 20_000, "longest_edge": 40_000}
    assert torch.equal(rows, reference.features(image, size=size))
    [nested] = encode(family, picture_item(png(image), preprocess_kwargs=limits, detail="low"))
    assert torch.equal(rows, nested)


@pytest.mark.parametrize(
    "options", [{"max_pixels": 0}, {"max_pixels": "many"}, {"min_pixels": 9, "max_pixels": 4}]
)
def test_options_that_make_no_sense_are_refused(family: Family, options: dict[str, Any]) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, picture_item(png(picture(20, 20)), **options))
    assert refusal.value.code is ErrorCode.BAD_OPTION


def test_the_daemons_options_hold_for_every_picture(checkpoint: Path, reference: Reference) -> None:
    family = load_family(
        checkpoint, image={"max_pixels": 40_000, "min_pixels": 3136, "image_mean": [0.1] * 3}
    )
    image = picture(300, 500)
    expected = reference.features(
        image, size={"shortest_edge": 3136, "longest_edge": 40_000}, image_mean=[0.1] * 3
    )
    assert torch.equal(encode(family, picture_item(png(image)))[0], expected)


def test_a_checkpoint_without_its_processor_is_a_configuration_error(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_checkpoints["qwen2_vl"] / name)
    with pytest.raises(ConfigurationError, match="image processor"):
        load_family(tmp_path)


def test_a_worker_process_gives_the_rows_of_hugging_face(tiny_checkpoints: TinyCheckpoints) -> None:
    checkpoint = tiny_checkpoints["qwen3_vl"]
    image, other = picture(224, 336), picture(90, 60)
    with Harness(tower="auto", checkpoint=str(checkpoint)) as worker:
        info = worker.control.info()
        alone = worker.outcome(bytes(png(image))).end
        both = worker.outcome(bytes(png(image)), b"no picture", bytes(png(other))).end
        modality = worker.outcome(bytes(png(image)), modality="audio").end
        assert alone.kind is CompletionKind.READY
        rows = torch.from_numpy(worker.rows(alone))
        metadata = worker.metadata(alone)
    reference = Reference(checkpoint, "qwen3_vl")
    assert torch.equal(rows, reference.features(image))
    assert metadata.items[0].grids == reference.grid(image)
    assert (metadata.items[0].width, metadata.items[0].height) == (336, 224)
    assert (info.model_type, info.dim, info.device) == ("qwen3_vl", 256, "cpu")
    assert json.loads((checkpoint / "config.json").read_text())["encoderd_seed"] == 11
    assert (both.error, both.error_item) == (ErrorCode.NOT_AN_IMAGE, 1)
    assert modality.error == ErrorCode.MODALITY_UNSUPPORTED
