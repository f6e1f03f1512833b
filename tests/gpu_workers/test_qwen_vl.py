"""The Qwen families against Hugging Face's own get_image_features on the same pictures."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families import qwen_vl
from gpu_workers.families.base import MediaItem
from gpu_workers.families.qwen_vl import QwenVl
from shm.errors import ErrorCode
from shm.layout import CompletionKind, Dtype
from tests.gpu_workers.conftest import FAMILIES
from tests.gpu_workers.harness import Harness, worker_config
from tests.gpu_workers.test_image_cases import FAMILY_DECIDES, image_cases, read

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

SIZES = [(224, 336), (150, 100), (3, 50), (448, 448), (1, 1)]


def picture(height: int, width: int) -> Image.Image:
    random = np.random.default_rng(height * 10_007 + width)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> memoryview:
    file = io.BytesIO()
    image.save(file, "PNG")
    return memoryview(file.getvalue())


def picture_item(data: memoryview) -> MediaItem:
    return MediaItem("image", (data,))


def load(checkpoint: Path, model_type: str, dtype: str = "auto") -> QwenVl:
    config = worker_config(checkpoint=str(checkpoint), tower="auto", dtype=dtype)
    return qwen_vl.load(config, torch.device("cpu"), model_type)


def encode(family: QwenVl, *items: memoryview) -> list[torch.Tensor]:
    media = [picture_item(item) for item in items]
    plans = [family.inspect(item) for item in media]
    prepared = [family.preprocess(item, plan) for item, plan in zip(media, plans, strict=True)]
    rows = family.forward(prepared)
    assert [tuple(tensor.shape) for tensor in rows] == [(plan.rows, family.info().dim) for plan in plans]
    return [torch.as_tensor(tensor).clone() for tensor in rows]


class Reference:
    """The whole Hugging Face model and its processor."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")

    def features(self, image: Image.Image) -> torch.Tensor:
        """Rows with DeepStack levels behind them."""
        inputs = self.processor(images=[image], return_tensors="pt")
        with torch.no_grad():
            output = self.model.get_image_features(**inputs)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        return torch.cat([level[0] for level in levels], dim=-1)

    def grid(self, image: Image.Image) -> list[list[int]]:
        """image_grid_thw."""
        grid: list[list[int]] = self.processor(images=[image], return_tensors="pt")["image_grid_thw"].tolist()
        return grid


@pytest.fixture(scope="module", params=FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family_name: str, tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints[family_name]


@pytest.fixture(scope="module")
def family(checkpoint: Path, family_name: str) -> QwenVl:
    return load(checkpoint, family_name)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_single_picture_equals_hugging_face_exactly(
    family: QwenVl, reference: Reference, height: int, width: int
) -> None:
    image = picture(height, width)
    [rows] = encode(family, png(image))
    assert rows.dtype is torch.float32
    assert torch.equal(rows, reference.features(image))


@pytest.mark.parametrize(("height", "width"), [*SIZES, (2048, 16), (27, 257), (16, 2048), (1080, 1920)])
def test_the_plan_from_the_header_is_the_processors_grid(
    family: QwenVl, reference: Reference, height: int, width: int
) -> None:
    image = picture(height, width)
    plan = family.inspect(picture_item(png(image)))
    assert plan.grids == reference.grid(image)
    assert (plan.width, plan.height) == (width, height)
    assert plan.rows == plan.cost_patches // 4


def test_a_batch_is_as_close_to_the_truth_as_hugging_face_is(
    family: QwenVl, reference: Reference, checkpoint: Path
) -> None:
    truth = Reference(checkpoint, torch.float64)
    images = [picture(*size) for size in SIZES]
    for rows, image in zip(encode(family, *map(png, images)), images, strict=True):
        assert_as_close(rows, reference.features(image), truth.features(image))


def test_bfloat16_is_as_close_to_the_truth_as_hugging_face_is(checkpoint: Path, family_name: str) -> None:
    family = load(checkpoint, family_name, "bfloat16")
    half, truth = Reference(checkpoint, torch.bfloat16), Reference(checkpoint, torch.float64)
    assert family.info().dtype is Dtype.BFLOAT16
    images = [picture(*size) for size in SIZES]
    [alone] = encode(family, png(images[0]))
    assert torch.equal(alone, half.features(images[0]))
    for rows, image in zip(encode(family, *map(png, images)), images, strict=True):
        assert_as_close(rows, half.features(image), truth.features(image))


def assert_as_close(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """Our largest and our mean error are at most 1.25 times Hugging Face's (equal on most machines)."""
    our_error, their_error = (ours.double() - truth).abs(), (theirs.double() - truth).abs()
    assert our_error.max() <= 1.25 * their_error.max()
    assert our_error.mean() <= 1.25 * their_error.mean()


def test_deepstack_levels_make_the_rows_wider(tiny_checkpoints: dict[str, Path]) -> None:
    widths = {name: load(tiny_checkpoints[name], name).info().dim for name in FAMILIES}
    assert widths == {"qwen2_vl": 64, "qwen2_5_vl": 64, "qwen3_vl": 64 * (1 + 3)}


def test_an_aspect_ratio_over_200_is_refused_with_both_numbers(family: QwenVl) -> None:
    with pytest.raises(ItemError) as refusal:
        family.inspect(picture_item(png(picture(1, 201))))
    error = refusal.value
    assert (error.code, error.value, error.limit) == (ErrorCode.ASPECT_RATIO, 201, 200)
    assert family.inspect(picture_item(png(picture(1, 200)))).rows > 0


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
    case: dict[str, Any], name: str, loaded: Callable[[str], QwenVl]
) -> None:
    facts = case["expect"]["facts"]["hf"][name]
    family = loaded(name)
    plan = family.inspect(picture_item(read(case)))
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
def loaded(tiny_checkpoints: dict[str, Path]) -> Callable[[str], QwenVl]:
    families = {name: load(tiny_checkpoints[name], name) for name in ("qwen2_vl", "qwen3_vl")}
    return families.__getitem__


@pytest.mark.parametrize("case", [case for case in image_cases() if case["id"] in FAMILY_DECIDES])
def test_cases_that_these_families_refuse_are_refused(
    case: dict[str, Any], loaded: Callable[[str], QwenVl]
) -> None:
    for name in case["families"]:
        if name in ("qwen2_vl", "qwen3_vl"):
            with pytest.raises(ItemError):
                loaded(name).inspect(picture_item(read(case)))


def test_a_checkpoint_without_its_processor_is_a_configuration_error(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_checkpoints["qwen2_vl"] / name)
    with pytest.raises(ConfigurationError, match="image processor"):
        load(tmp_path, "qwen2_vl")


def test_a_worker_process_gives_the_rows_of_hugging_face(tiny_checkpoints: dict[str, Path]) -> None:
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
    reference = Reference(checkpoint)
    assert torch.equal(rows, reference.features(image))
    assert metadata.items[0].grids == reference.grid(image)
    assert (metadata.items[0].width, metadata.items[0].height) == (336, 224)
    assert (info.model_type, info.dim, info.device) == ("qwen3_vl", 256, "cpu")
    assert json.loads((checkpoint / "config.json").read_text())["encoderd_seed"] == 11
    assert (both.error, both.error_item) == (ErrorCode.NOT_AN_IMAGE, 1)
    assert modality.error == ErrorCode.MODALITY_UNSUPPORTED
