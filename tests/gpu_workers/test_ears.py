"""Sound of every family against what Hugging Face's processor and whole model make of the same samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.ears import rows_of_blocks
from shm.errors import ErrorCode
from shm.layout import CompletionKind
from tests.gpu_workers.conftest import SOUND_FAMILIES, TinyCheckpoints
from tests.gpu_workers.harness import Harness
from tests.gpu_workers.reference import (
    assert_as_close,
    audio_inputs,
    encode,
    load_family,
    noise,
    plan_of,
    wav,
    whole_model,
)

SECOND = 16_000
LENGTHS = [3 * SECOND, 20_800, 7 * SECOND + 77, 1_000]
BATCH_LENGTHS = [*LENGTHS, SECOND, 2 * SECOND + 1, 5 * SECOND, 12_345]


def item_of(samples: np.ndarray, **container: str) -> MediaItem:
    return MediaItem("audio", (wav(samples, **container),))


class Reference:
    """The whole Hugging Face model and its processor."""

    def __init__(self, checkpoint: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.family = family
        self.model = whole_model(checkpoint, family, dtype)
        self.processor = transformers.AutoProcessor.from_pretrained(checkpoint)

    def inputs(self, samples: np.ndarray) -> dict[str, Any]:
        """Of one sound, by the processor's own audio half: tensors and num_audio_tokens."""
        return audio_inputs(self.processor, self.family, samples)

    def features(self, samples: np.ndarray) -> torch.Tensor:
        """Rows of one sound."""
        inputs = self.inputs(samples)
        features = inputs["input_features"].to(self.model.dtype)
        with torch.no_grad():
            if self.family == "qwen2_audio":
                return self._qwen2_audio(features, inputs["feature_attention_mask"])
            mask_name = "feature_attention_mask" if "omni" in self.family else "input_features_mask"
            output = self.model.get_audio_features(features, inputs[mask_name])
        rows = output.pooler_output if output.pooler_output is not None else output.last_hidden_state
        return torch.as_tensor(rows)

    def _qwen2_audio(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """It has no get_audio_features, so its forward is watched: what goes into the language model where
        the audio tokens stand."""
        rows = int(((mask.sum() - 1) // 2 + 1 - 2) // 2 + 1)
        token = self.model.config.audio_token_id
        seen: list[torch.Tensor] = []

        def watch(module: Any, args: Any, kwargs: Any) -> None:
            seen.append(kwargs["inputs_embeds"])

        hook = self.model.model.language_model.register_forward_pre_hook(watch, with_kwargs=True)
        ids = torch.full((1, rows + 2), token)
        ids[0, 0] = ids[0, -1] = 1
        self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=features,
            feature_attention_mask=mask,
        )
        hook.remove()
        return seen[0][0, 1:-1]

    def tokens(self, samples: np.ndarray) -> int:
        """As the processor expands the prompt."""
        return int(self.inputs(samples)["num_audio_tokens"][0])


@pytest.fixture(scope="module", params=SOUND_FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(checkpoint: Path, family_name: str) -> Reference:
    return Reference(checkpoint, family_name)


@pytest.mark.parametrize("samples", LENGTHS)
def test_a_single_sound_equals_hugging_face_exactly(
    family: Family, reference: Reference, samples: int
) -> None:
    sound = noise(samples)
    item = item_of(sound)
    plan = family.inspect(item)
    assert plan is not None
    assert plan.rows == reference.tokens(sound)
    assert torch.equal(encode(family, item)[0], reference.features(sound))


def test_the_length_before_the_tower_is_told(family: Family, reference: Reference) -> None:
    sound = noise(7 * SECOND + 77)
    inputs = reference.inputs(sound)
    mask = inputs.get("feature_attention_mask", inputs.get("input_features_mask"))
    plan = plan_of(family, item_of(sound))
    assert plan.aux.audio_feature_length == int(mask.sum())
    assert plan.grids == [[int(mask.sum())]]


def test_a_mixed_batch_gives_each_sound_its_own_rows(
    family: Family, reference: Reference, checkpoint: Path, family_name: str
) -> None:
    truth = Reference(checkpoint, family_name, torch.float64)
    sounds = [noise(samples) for samples in BATCH_LENGTHS]
    for rows, sound in zip(encode(family, *map(item_of, sounds)), sounds, strict=True):
        assert_as_close(rows, reference.features(sound), truth.features(sound))


def test_sound_over_thirty_seconds_is_not_cut(family: Family, family_name: str, reference: Reference) -> None:
    sound = noise(34 * SECOND)
    if family_name == "qwen2_audio":  # its tower takes thirty seconds and nothing else
        with pytest.raises(ItemError) as refusal:
            plan_of(family, item_of(sound))
        error = refusal.value
        assert (error.code, error.value, error.limit) == (ErrorCode.TOO_LONG, 34, 30)
        return
    assert plan_of(family, item_of(sound)).rows == reference.tokens(sound)
    assert torch.equal(encode(family, item_of(sound))[0], reference.features(sound))


def test_what_a_header_does_not_count_is_measured(family: Family) -> None:
    item = item_of(noise(2 * SECOND), container="OGG")
    assert family.inspect(item) is None
    plan = family.measure(item)
    assert plan.rows > 0
    assert encode(family, item)[0].shape[0] == plan.rows


def test_sound_too_short_for_a_row_is_refused_with_both_numbers(family: Family, family_name: str) -> None:
    if family_name == "qwen3_asr":  # pads it to half a second
        assert plan_of(family, item_of(noise(1))).rows > 0
        return
    with pytest.raises(ItemError) as refusal:
        plan_of(family, item_of(noise(100)))
    error = refusal.value
    assert (error.code, error.value) == (ErrorCode.TOO_SHORT, 100)
    [rows] = encode(family, item_of(noise(error.limit)))
    assert rows.shape[0] == 1


def test_another_rate_than_the_models_is_a_configuration_error(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match="sampling_rate 8000"):
        load_family(checkpoint, audio={"sampling_rate": 8000})


def test_thirteen_rows_stand_for_a_block_of_a_hundred_frames() -> None:
    assert [rows_of_blocks(frames, 100) for frames in (0, 1, 8, 9, 99, 100, 101, 300)] == [
        0,
        1,
        1,
        2,
        13,
        13,
        14,
        39,
    ]


def test_a_worker_process_gives_sound_and_pictures_rows_of_their_own_width(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    checkpoint = tiny_checkpoints["qwen3_omni_moe"]
    sound = noise(3 * SECOND)
    with Harness(tower="auto", checkpoint=str(checkpoint)) as worker:
        info = worker.control.info()
        end = worker.outcome(bytes(wav(sound)), modality="audio").end
        assert end.kind is CompletionKind.READY
        rows, metadata = torch.from_numpy(worker.rows(end)), worker.metadata(end)
    assert info.modalities == ["image", "video", "audio"]
    assert torch.equal(rows, Reference(checkpoint, "qwen3_omni_moe").features(sound))
    assert (metadata.items[0].row_count, metadata.items[0].aux.audio_feature_length) == (39, 300)
