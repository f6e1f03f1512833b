"""What is said of sound once for a checkpoint: its rate, and the options of --mm-process-config."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import MediaItem
from gpu_workers.families.sound import choose_rate
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import load_family, noise, plan_of, wav

EXTRACTOR = transformers.WhisperFeatureExtractor(sampling_rate=24_000)
AUDIO_CONFIG = transformers.PretrainedConfig(sampling_rate=8_000)
SILENT = transformers.PretrainedConfig()


@pytest.mark.parametrize(
    ("options", "extractor", "audio_config", "rate"),
    [
        ({"sampling_rate": 24_000}, EXTRACTOR, AUDIO_CONFIG, 24_000),
        ({"sampling_rate": 44_100}, SILENT, AUDIO_CONFIG, 44_100),
        ({}, EXTRACTOR, AUDIO_CONFIG, 24_000),
        ({}, SILENT, AUDIO_CONFIG, 8_000),
        ({}, SILENT, SILENT, 16_000),
        ({}, SILENT, None, 16_000),
    ],
)
def test_the_rate_is_the_daemons_then_the_processors_then_the_models_then_16_khz(
    options: dict[str, Any], extractor: Any, audio_config: Any, rate: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_rate(options, extractor, audio_config) == rate
    assert ("no sampling rate: 16000 Hz" in caplog.text) == (rate == 16_000)


@pytest.fixture
def at_24_khz(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> Path:
    """A checkpoint whose processor wants another rate."""
    checkpoint = tmp_path / "qwen3_omni_moe"
    shutil.copytree(tiny_checkpoints["qwen3_omni_moe"], checkpoint)
    path = checkpoint / "processor_config.json"
    described = json.loads(path.read_text())
    described["feature_extractor"]["sampling_rate"] = 24_000
    path.write_text(json.dumps(described))
    return checkpoint


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_sound_is_resampled_to_the_rate_of_the_processor(at_24_khz: Path) -> None:
    """Two seconds at 16 kHz are as many frames as 48,000 samples."""
    plan = plan_of(load_family(at_24_khz), MediaItem("audio", (wav(noise(32_000)),)))
    assert plan.aux.audio_feature_length == 48_000 // 160


@pytest.mark.parametrize(
    ("name", "value"), [("truncation", True), ("padding", False), ("return_attention_mask", False)]
)
def test_an_option_that_the_ears_do_not_follow_is_a_configuration_error(
    name: str, value: bool, tiny_checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(ConfigurationError, match=f"--mm-process-config audio: {name} {value}"):
        load_family(tiny_checkpoints["qwen2_audio"], audio={name: value})


def test_the_defaults_may_be_said(tiny_checkpoints: TinyCheckpoints) -> None:
    said = {"truncation": False, "padding": "max_length", "return_attention_mask": True}
    family = load_family(tiny_checkpoints["qwen2_audio"], audio=said)
    item = MediaItem("audio", (wav(noise(20_800)),))
    assert plan_of(family, item) == plan_of(load_family(tiny_checkpoints["qwen2_audio"]), item)
