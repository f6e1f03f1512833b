"""Sound of models that nobody registered: Audio Flamingo 3 and Voxtral, as transformers has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save

from gpu_workers.checkpoints.recipe import byte_tokenizer
from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import Family, MediaItem
from shm.errors import ErrorCode, TensorFault
from shm.layout import CompletionKind
from tests.gpu_workers.harness import Harness
from tests.gpu_workers.reference import encode, load_family, noise, plan_of, wav

SECOND = 16_000
LANGUAGE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EAR = {
    "num_mel_bins": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "hidden_size": 32,
    "max_source_positions": 1500,
}


def flamingo(directory: Path) -> None:
    """Windows of thirty seconds, a mask, and a processor that makes both."""
    tokenizer = byte_tokenizer(["<sound>"])
    config = transformers.AudioFlamingo3Config(
        text_config={"model_type": "qwen2", **LANGUAGE},
        audio_config=EAR,
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    processor = transformers.AudioFlamingo3Processor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        audio_token="<sound>",
    )
    processor.save_pretrained(directory)
    transformers.AudioFlamingo3ForConditionalGeneration(config).save_pretrained(directory)


def voxtral(directory: Path) -> None:
    """One window, no mask, and a feature extractor alone."""
    config = transformers.VoxtralConfig(
        text_config={"model_type": "llama", **LANGUAGE},
        audio_config={**EAR, "head_dim": 16},
        audio_token_id=300,
    )
    transformers.WhisperFeatureExtractor(feature_size=128).save_pretrained(directory)
    transformers.VoxtralForConditionalGeneration(config).save_pretrained(directory)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def made(recipe: Callable[[Path], None]) -> Path:
        directory = tmp_path_factory.mktemp(recipe.__name__)
        torch.manual_seed(5)
        recipe(directory)
        return directory

    return made


@pytest.fixture(scope="module")
def checkpoint(make: Callable[..., Path]) -> Path:
    return make(flamingo)


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers.AudioFlamingo3ForConditionalGeneration.from_pretrained(checkpoint)


def item_of(samples: int) -> MediaItem:
    return MediaItem("audio", (wav(noise(samples)),))


def inputs_of(checkpoint: Path, samples: int) -> dict[str, Any]:
    """By the processor as a user calls it, with a prompt."""
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    return dict(processor(text="<sound>", audio=noise(samples), return_tensors="pt"))


def features(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output = model.get_audio_features(inputs["input_features"], inputs["input_features_mask"])
    rows: torch.Tensor = output.pooler_output
    return rows


@pytest.mark.parametrize("samples", [3 * SECOND, 20_800, 34 * SECOND])
def test_the_sound_of_an_unregistered_model_equals_hugging_face(
    family: Family, checkpoint: Path, model: Any, samples: int
) -> None:
    inputs = inputs_of(checkpoint, samples)
    plan = plan_of(family, item_of(samples))
    assert plan.rows == int((inputs["input_ids"] == model.config.audio_token_id).sum())
    assert plan.aux.audio_feature_length == int(inputs["input_features_mask"].sum())
    assert torch.equal(encode(family, item_of(samples))[0], features(model, inputs))


def test_sounds_of_different_lengths_get_exactly_their_rows(family: Family) -> None:
    items = [item_of(samples) for samples in (3 * SECOND, 20_800, 7 * SECOND)]
    alone = [encode(family, item)[0] for item in items]
    assert all(map(torch.equal, encode(family, *items), alone))


def test_processed_sound_has_the_rows_of_the_raw_one(family: Family, checkpoint: Path) -> None:
    inputs = inputs_of(checkpoint, 34 * SECOND)
    tensors = {name: inputs[name].contiguous() for name in ("input_features", "input_features_mask")}
    item = MediaItem("audio", (memoryview(save(tensors)),), "processed")
    assert torch.equal(encode(family, item)[0], encode(family, item_of(34 * SECOND))[0])
    tensors["input_features"] = tensors["input_features"][:, :80].contiguous()
    with pytest.raises(ItemError) as refusal:
        plan_of(family, MediaItem("audio", (memoryview(save(tensors)),), "processed"))
    assert refusal.value.code is ErrorCode.TENSOR_SIZE
    assert TensorFault.unpack(refusal.value.value) == TensorFault("input_features", 1, 80)


def test_sound_too_short_for_a_row_is_refused(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, item_of(100))
    assert (refusal.value.code, refusal.value.value) == (ErrorCode.TOO_SHORT, 100)


def test_a_worker_process_serves_such_a_model(checkpoint: Path, family: Family) -> None:
    with Harness(tower="auto", checkpoint=str(checkpoint)) as worker:
        end = worker.outcome(bytes(wav(noise(20_800))), modality="audio").end
        assert end.kind is CompletionKind.READY
        rows = torch.from_numpy(worker.rows(end))
        assert worker.control.info().modalities == ["audio"]
    assert torch.equal(rows, encode(family, item_of(20_800))[0])


def test_a_feature_extractor_alone_will_do(make: Callable[..., Path]) -> None:
    directory = make(voxtral)
    family = load_family(directory)
    model = transformers.VoxtralForConditionalGeneration.from_pretrained(directory)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(directory)
    inputs = extractor([noise(20_800)], sampling_rate=SECOND, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_audio_features(inputs["input_features"]).pooler_output
    assert torch.equal(encode(family, item_of(20_800))[0], expected)
    with pytest.raises(ItemError) as refusal:  # its tower takes one window
        plan_of(family, item_of(34 * SECOND))
    assert refusal.value.code is ErrorCode.UNSUPPORTED_FORMAT


def test_what_the_processor_does_not_give_is_named_at_start(make: Callable[..., Path]) -> None:
    directory = make(voxtral)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(directory)
    with pytest.raises(ConfigurationError, match=r"needs input_features, and \w+ gives input_values"):
        load_family(directory)


def test_a_library_that_the_processor_wants_is_named_at_start(make: Callable[..., Path]) -> None:
    directory = make(voxtral)
    described = {"feature_extractor_type": "GraniteSpeechFeatureExtractor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="torchaudio"):
        load_family(directory)
