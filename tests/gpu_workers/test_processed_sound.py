"""Processed sound: what each family's own processor gives, sent as tensors, becomes the rows of the same
sound sent raw; whatever its processor cannot have made is refused by name and limit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from shm.errors import ErrorCode, TensorFault
from tests.gpu_workers.conftest import SOUND_FAMILIES
from tests.gpu_workers.reference import encode, noise, plan_of, processed_sound, wav

SECOND = 16_000
MASKS = {
    "qwen2_audio": "feature_attention_mask",
    "qwen2_5_omni": "feature_attention_mask",
    "qwen3_omni_moe": "feature_attention_mask",
    "qwen3_asr": "input_features_mask",
    "glmasr": "input_features_mask",
}


def item_of(tensors: dict[str, torch.Tensor]) -> MediaItem:
    return MediaItem("audio", (memoryview(save(tensors)),), "processed")


def raw_item(samples: int) -> MediaItem:
    return MediaItem("audio", (wav(noise(samples)),))


@pytest.fixture(scope="module", params=SOUND_FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("samples", [3 * SECOND, 20_800, 1_000])
def test_processed_sound_has_the_rows_of_the_raw_one(
    family: Family, checkpoint: Path, family_name: str, samples: int
) -> None:
    item = item_of(processed_sound(checkpoint, family_name, samples))
    plan, raw = family.inspect(item), plan_of(family, raw_item(samples))
    assert plan is not None
    assert (plan.rows, plan.grids, plan.aux) == (raw.rows, raw.grids, raw.aux)
    assert torch.equal(encode(family, item)[0], encode(family, raw_item(samples))[0])


def test_sound_of_several_windows_is_taken(family: Family, checkpoint: Path, family_name: str) -> None:
    if family_name == "qwen2_audio":
        return  # takes thirty seconds and no more
    item = item_of(processed_sound(checkpoint, family_name, 34 * SECOND))
    assert torch.equal(encode(family, item)[0], encode(family, raw_item(34 * SECOND))[0])


def test_lengths_do_instead_of_a_mask(family: Family, checkpoint: Path, family_name: str) -> None:
    tensors = processed_sound(checkpoint, family_name, 20_800)
    lengths = tensors.pop(MASKS[family_name]).sum(-1)
    item = item_of(tensors | {"audio_feature_lengths": lengths})
    assert torch.equal(encode(family, item)[0], encode(family, raw_item(20_800))[0])


def test_what_padding_for_a_batch_added_is_cut_off(
    family: Family, checkpoint: Path, family_name: str
) -> None:
    tensors = processed_sound(checkpoint, family_name, 20_800)
    if tensors["input_features"].shape[-1] == 3000:
        return  # this processor pads every sound to the same length anyway
    name = MASKS[family_name]
    longer = {
        "input_features": torch.nn.functional.pad(tensors["input_features"], (0, 200)),
        name: torch.nn.functional.pad(tensors[name], (0, 200)),
    }
    assert torch.equal(encode(family, item_of(longer))[0], encode(family, raw_item(20_800))[0])


def refusal(family: Family, tensors: dict[str, torch.Tensor]) -> tuple[ErrorCode, TensorFault, int]:
    with pytest.raises(ItemError) as refused:
        plan_of(family, item_of(tensors))
    return refused.value.code, TensorFault.unpack(refused.value.value), refused.value.limit


def test_wrong_shapes_types_and_lengths_are_named(family: Family, checkpoint: Path, family_name: str) -> None:
    good, name = processed_sound(checkpoint, family_name, 20_800), MASKS[family_name]
    features, mask = good["input_features"], good[name]
    windows, bins, frames = features.shape
    assert refusal(family, good | {"input_features": features[:, :-1].contiguous()}) == (
        ErrorCode.TENSOR_SIZE,
        TensorFault("input_features", 1, bins - 1),
        bins,
    )
    assert refusal(family, good | {"input_features": features[0]})[:2] == (
        ErrorCode.TENSOR_DIMENSIONS,
        TensorFault("input_features", 0, 2),
    )
    assert refusal(family, good | {"input_features": features.long()})[0] is ErrorCode.TENSOR_TYPE
    assert refusal(family, good | {name: mask[:, :-1].contiguous()}) == (
        ErrorCode.TENSOR_SIZE,
        TensorFault(name, 1, frames - 1),
        frames,
    )
    assert refusal(family, {"input_features": features})[:2] == (
        ErrorCode.TENSOR_MISSING,
        TensorFault(name),
    )
    lengths = torch.tensor([frames + 1] * windows)
    assert refusal(family, {"input_features": features, "audio_feature_lengths": lengths}) == (
        ErrorCode.TENSOR_VALUE,
        TensorFault("audio_feature_lengths", 0, frames + 1),
        frames,
    )
    holes = mask.clone()
    holes[:, 0] = 0
    assert refusal(family, good | {name: holes})[1].name == name
    assert refusal(family, good | {name: torch.zeros_like(mask)})[1].name == name


def test_what_is_not_finite_is_refused(family: Family, checkpoint: Path, family_name: str) -> None:
    tensors = processed_sound(checkpoint, family_name, 20_800)
    tensors["input_features"][0, 0, 0] = torch.nan
    with pytest.raises(ItemError) as refused:
        encode(family, item_of(tensors))
    assert refused.value.code is ErrorCode.TENSOR_NOT_FINITE
