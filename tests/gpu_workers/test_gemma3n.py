"""Gemma 3n's sound against transformers' own class, run whole but for the vision tower, which wants timm."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.gemma3n import without_eyes
from shm.errors import ErrorCode, TensorFault
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import assert_as_close, encode, load_family, noise, plan_of, wav

SECOND = 16_000
ROWS = 188


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints["gemma3n"]


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(checkpoint)


class Reference:
    """The model with its language model, and its processor."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = without_eyes().from_pretrained(checkpoint, dtype=dtype)
        self.processor = transformers.AutoProcessor.from_pretrained(checkpoint)

    def inputs(self, samples: int) -> dict[str, torch.Tensor]:
        """Of one sound; nothing is cut."""
        outputs = self.processor.feature_extractor(
            [noise(samples)], truncation=False, return_tensors="pt", sampling_rate=SECOND
        )
        return dict(outputs)

    def features(self, samples: int) -> torch.Tensor:
        """get_audio_features, as the model's forward calls it."""
        inputs = self.inputs(samples)
        features = inputs["input_features"].to(self.model.dtype)
        with torch.no_grad():
            output = self.model.model.get_audio_features(features, ~inputs["input_features_mask"])
        rows: torch.Tensor = output.pooler_output[0]
        return rows

    def prompt(self, samples: int) -> torch.Tensor:
        """What goes into the language model where the processor has put audio tokens."""
        text = self.processor.audio_token
        inputs = self.processor(text=text, audio=noise(samples), return_tensors="pt")
        seen: list[torch.Tensor] = []

        def watch(module: Any, args: Any, kwargs: Any) -> None:
            seen.append(kwargs["inputs_embeds"])

        hook = self.model.model.language_model.register_forward_pre_hook(watch, with_kwargs=True)
        token = self.processor.audio_token_id
        ids = torch.where(inputs["input_ids"] == token, self.model.config.audio_token_id, 1)
        self.model(
            input_ids=ids,
            input_features=inputs["input_features"],
            input_features_mask=inputs["input_features_mask"],
        )
        hook.remove()
        return seen[0][ids == self.model.config.audio_token_id]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def item_of(samples: int) -> MediaItem:
    return MediaItem("audio", (wav(noise(samples)),))


@pytest.mark.parametrize("samples", [3 * SECOND, 20_800, 7 * SECOND + 77, 600])
def test_rows_are_what_the_model_puts_into_its_prompt(
    family: Family, reference: Reference, samples: int
) -> None:
    [rows] = encode(family, item_of(samples))
    expected = reference.prompt(samples)
    assert len(rows) == len(expected) == ROWS
    assert torch.equal(rows, expected)
    features = reference.features(samples)
    assert torch.equal(rows[: len(features)], features)


def test_sound_over_thirty_seconds_is_not_cut(family: Family, reference: Reference) -> None:
    samples = 34 * SECOND
    [rows] = encode(family, item_of(samples))
    assert len(rows) > ROWS
    assert torch.equal(rows, reference.features(samples))


def test_the_length_before_the_tower_is_told(family: Family, reference: Reference) -> None:
    for samples in (20_800, 7 * SECOND + 77, 600):
        plan = plan_of(family, item_of(samples))
        assert plan.aux.audio_feature_length == int(reference.inputs(samples)["input_features_mask"].sum())


def test_a_mixed_batch_gives_each_sound_its_own_rows(
    family: Family, reference: Reference, checkpoint: Path
) -> None:
    truth = Reference(checkpoint, torch.float64)
    lengths = [3 * SECOND, 20_800, 3 * SECOND, 1_000, SECOND, 2 * SECOND + 1, 20_800, 12_345]
    for rows, samples in zip(encode(family, *map(item_of, lengths)), lengths, strict=True):
        features = reference.features(samples)
        assert_as_close(rows[: len(features)], features, truth.features(samples))


def test_sound_shorter_than_a_window_is_refused(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, item_of(512))
    assert (refusal.value.code, refusal.value.value, refusal.value.limit) == (ErrorCode.TOO_SHORT, 512, 513)


def test_processed_sound_has_the_rows_of_the_raw_one(family: Family, reference: Reference) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in reference.inputs(20_800).items()}
    item = MediaItem("audio", (memoryview(save(tensors)),), "processed")
    assert torch.equal(encode(family, item)[0], encode(family, item_of(20_800))[0])
    tensors["input_features_mask"] = tensors["input_features_mask"][:, :-1].contiguous()
    with pytest.raises(ItemError) as refusal:
        plan_of(family, MediaItem("audio", (memoryview(save(tensors)),), "processed"))
    assert refusal.value.code is ErrorCode.TENSOR_SIZE
    assert TensorFault.unpack(refusal.value.value).name == "input_features_mask"


def test_neither_eyes_nor_language_model_are_loaded(family: Family, reference: Reference) -> None:
    ears = reference.model.model
    towers = [*ears.audio_tower.parameters(), *ears.embed_audio.parameters()]
    buffers = [*ears.audio_tower.buffers(), *ears.embed_audio.buffers()]
    assert family.info().modalities == ("audio",)
    assert family.info().tower_bytes == sum(tensor.nbytes for tensor in [*towers, *buffers])
    with pytest.raises(ItemError) as refusal:
        family.inspect(MediaItem("image", (memoryview(b"x"),)))
    assert refusal.value.code is ErrorCode.MODALITY_UNSUPPORTED
