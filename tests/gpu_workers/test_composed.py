"""Families of several modalities: what a checkpoint lacks, the others do without."""

import logging
from pathlib import Path

import pytest

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import MediaItem
from shm.errors import ErrorCode
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import encode, load_family, noise, picture, picture_item, png, wav


def only(checkpoint: Path, directory: Path, *names: str) -> Path:
    """A checkpoint with these files of another alone."""
    for name in ("config.json", "model.safetensors", *names):
        (directory / name).symlink_to(checkpoint / name)
    return directory


def test_a_checkpoint_without_one_processor_serves_the_other_modalities(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny_checkpoints["qwen2_audio"]
    pictures = tiny_checkpoints["qwen2_5_omni"]
    assert (checkpoint / "processor_config.json").exists()
    reduced = only(pictures, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    with caplog.at_level(logging.WARNING):
        family = load_family(reduced)
    assert "audio" not in family.info().modalities
    assert any("audio is not served" in record.getMessage() for record in caplog.records)
    assert encode(family, picture_item(png(picture(60, 60))))[0].shape[0] > 0
    with pytest.raises(ItemError) as refusal:
        family.inspect(MediaItem("audio", (wav(noise(1000)),)))
    assert refusal.value.code is ErrorCode.MODALITY_UNSUPPORTED


def test_a_checkpoint_without_any_processor_cannot_be_served(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="no image processor"):
        load_family(only(tiny_checkpoints["qwen2_5_omni"], tmp_path))


def test_a_daemon_option_that_makes_no_sense_is_a_configuration_error(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    with pytest.raises(ConfigurationError, match="--mm-process-config video"):
        load_family(tiny_checkpoints["qwen2_vl"], video={"fps": -1})
