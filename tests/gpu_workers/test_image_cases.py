"""Every picture of the public cases, at the loader: size, pixels and digests, or the right refusal."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_workers.errors import ItemError
from gpu_workers.media.image import Background, ImageReader
from shm.errors import ErrorCode

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "cases"
MAX_PIXELS = 33_500_000

# What a refused picture is refused as. Aspect ratios are a family's affair (test_qwen_vl.py).
REFUSED_AS = {
    "img_trunc_jpeg": ErrorCode.TRUNCATED,
    "img_trunc_png": ErrorCode.TRUNCATED,
    "img_bomb_header": ErrorCode.TOO_MANY_PIXELS,
    "img_gif_bomb": ErrorCode.TOO_MANY_PIXELS,
    "img_zero_byte": ErrorCode.EMPTY_ITEM,
    "img_html": ErrorCode.NOT_AN_IMAGE,
    "img_pdf": ErrorCode.NOT_AN_IMAGE,
    "img_heic_stub": ErrorCode.UNSUPPORTED_FORMAT,
}
FAMILY_DECIDES = {"img_ratio201"}
# Gray of 16 bits and more is always scaled; what Hugging Face makes of it is clipped to white.
SIXTEEN_BIT = {"img_i16_png", "img_i32_tiff"}


def image_cases() -> list[dict[str, Any]]:
    manifest = CASES / "public" / "manifest.json"
    if not manifest.exists():
        return []
    return [case for case in json.loads(manifest.read_text())["cases"] if case["kind"] == "image"]


def accepted() -> list[Any]:
    return [
        pytest.param(case, id=case["id"]) for case in image_cases() if case["expect"]["verdict"] != "reject"
    ]


def rejected() -> list[Any]:
    return [
        pytest.param(case, id=case["id"])
        for case in image_cases()
        if case["expect"]["verdict"] == "reject" and case["id"] not in FAMILY_DECIDES
    ]


def read(case: dict[str, Any]) -> memoryview:
    return memoryview((CASES / case["files"][0]).read_bytes())


def assert_pixels(case: dict[str, Any], facts: dict[str, Any], background: Background) -> None:
    reader, data = ImageReader(MAX_PIXELS, background), read(case)
    size, rgb = reader.size(data), reader.rgb(data)
    assert [size.width, size.height] == case["expect"]["facts"]["decoded_size"]
    assert rgb.shape == (size.height, size.width, 3)
    assert rgb.dtype == np.uint8
    tolerance = max(pixel["tol"] for pixel in facts["pixels"])
    assert np.abs(rgb.reshape(-1, 3).mean(axis=0) - facts["mean"]).max() <= max(tolerance, 0.001)
    for pixel in facts["pixels"]:
        difference = np.abs(rgb[pixel["y"], pixel["x"]].astype(int) - pixel["rgb"]).max()
        assert difference <= pixel["tol"], pixel
    if "sha256_rgb" in facts:
        assert hashlib.sha256(rgb.tobytes()).hexdigest() == facts["sha256_rgb"]


@pytest.mark.parametrize("case", accepted())
def test_an_accepted_picture_has_the_recorded_pixels(case: dict[str, Any]) -> None:
    assert_pixels(case, case["expect"]["facts"]["rgb"], "white")


@pytest.mark.parametrize("case", accepted())
def test_without_a_background_the_pixels_are_hugging_faces(case: dict[str, Any]) -> None:
    facts = case["expect"]["facts"]
    if case["id"] in SIXTEEN_BIT:
        assert_pixels(case, facts["rgb"], "drop")
    else:
        assert_pixels(case, facts.get("rgb_hf_load_image", facts["rgb"]), "drop")


@pytest.mark.parametrize("case", rejected())
def test_a_rejected_picture_is_refused_for_its_own_reason(case: dict[str, Any]) -> None:
    reader = ImageReader(MAX_PIXELS, "white")
    with pytest.raises(ItemError) as refusal:
        reader.rgb(read(case))
    assert refusal.value.code is REFUSED_AS[case["id"]]


def test_the_cases_are_there() -> None:
    if not CASES.exists():
        pytest.skip("the shared cases are not beside this checkout")
    assert len(image_cases()) > 40
