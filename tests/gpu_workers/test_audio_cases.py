"""Every sound of the public cases, at the loader: samples and their facts, or the right refusal."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor

from gpu_workers.errors import ItemError
from gpu_workers.media.audio import AudioReader
from shm.errors import ErrorCode

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "cases"
RATE = 16000
REFUSED_AS = {
    "aud_empty_wav": ErrorCode.EMPTY_ITEM,
    "aud_nan": ErrorCode.NOT_FINITE,
    "aud_text": ErrorCode.NOT_AUDIO,
    # The header's count was promised before the decode, so a file that breaks it is refused.
    "aud_trunc_flac": ErrorCode.TRUNCATED,
}
# Their header does not count, or cannot be believed: only decoding tells.
UNCOUNTED = {"mp3", "m4a", "opus", "webm", "ogg", "mp4"}


def audio_cases() -> list[dict[str, Any]]:
    manifest = CASES / "public" / "manifest.json"
    if not manifest.exists():
        return []
    return [case for case in json.loads(manifest.read_text())["cases"] if case["kind"] == "audio"]


def accepted() -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in audio_cases() if case["id"] not in REFUSED_AS]


def with_samples() -> list[Any]:
    """Those whose samples were recorded as a file."""
    return [param for param in accepted() if "canonical" in param.values[0]["expect"]["facts"]]


def with_features() -> list[Any]:
    return [
        pytest.param(case, id=case["id"])
        for case in audio_cases()
        if case["id"] not in REFUSED_AS and "hf" in case["expect"]["facts"]
    ]


def rejected() -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in audio_cases() if case["id"] in REFUSED_AS]


def read(case: dict[str, Any]) -> memoryview:
    if "files" in case:
        return memoryview((CASES / case["files"][0]).read_bytes())
    return memoryview(base64.b64decode(case["request"]["mm_items"][0].split(",", 1)[1]))


@pytest.mark.parametrize("case", accepted())
def test_an_accepted_sound_has_the_recorded_samples(case: dict[str, Any]) -> None:
    facts = case["expect"]["facts"]["mono16k"]
    samples = AudioReader(max_seconds=600).samples(read(case), RATE)
    assert samples.dtype == np.float32
    assert abs(len(samples) - facts["samples"]) <= 1  # the manifest's tolerance is wider for lossy codecs
    assert np.sqrt(np.mean(samples.astype(np.float64) ** 2)) == pytest.approx(facts["rms"], abs=3e-5)
    if "peak_abs" in facts:
        assert np.abs(samples).max() == pytest.approx(facts["peak_abs"], abs=2e-5)
    if "first8" in facts:
        first = facts["first8"]
        assert samples[: len(first)] == pytest.approx(np.array(first), abs=2e-6)
    if facts.get("dominant_hz"):
        assert dominant_hz(samples) == pytest.approx(facts["dominant_hz"], abs=0.2)


@pytest.mark.parametrize("case", with_samples())
def test_an_accepted_sound_is_the_recorded_one(case: dict[str, Any]) -> None:
    facts = case["expect"]["facts"]
    recorded, rate = soundfile.read(CASES / facts["canonical"], dtype="float32")
    samples = AudioReader(max_seconds=600).samples(read(case), rate)
    together = min(len(samples), len(recorded))
    assert np.abs(samples[:together] - recorded[:together]).max() <= 4e-5  # recorded with 16 bits


@pytest.mark.parametrize("case", accepted())
def test_a_count_from_the_header_is_what_is_decoded(case: dict[str, Any]) -> None:
    reader, data = AudioReader(max_seconds=600), read(case)
    count = reader.probe_audio(data, RATE)
    name = case["files"][0] if "files" in case else ".wav"
    lossy = name.rpartition(".")[2] in UNCOUNTED and case["id"] != "aud_wrong_ext"
    assert (count is None) == lossy
    if count is not None:
        assert count == len(reader.samples(data, RATE))


@pytest.mark.parametrize("case", with_features())
def test_whispers_extractor_makes_the_recorded_features(case: dict[str, Any]) -> None:
    extractor = WhisperFeatureExtractor(feature_size=128)
    samples = AudioReader(max_seconds=600).samples(read(case), RATE)
    for name, facts in case["expect"]["facts"]["hf"].items():
        if "features_shape" not in facts:
            continue
        padding: dict[str, Any] = (
            {"padding": "max_length", "truncation": True}
            if "max_length" in name
            else {"padding": "longest", "truncation": False}
        )
        features = extractor(
            samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np", **padding
        )
        assert list(features["input_features"].shape) == facts["features_shape"]
        assert features["attention_mask"].sum() == facts["valid_frames"]
        assert features["input_features"].mean() == pytest.approx(facts["mean"], abs=2e-4)


@pytest.mark.parametrize("case", rejected())
def test_a_refused_sound_is_refused_for_its_own_reason(case: dict[str, Any]) -> None:
    with pytest.raises(ItemError) as refusal:
        AudioReader(max_seconds=600).samples(read(case), RATE)
    assert refusal.value.code is REFUSED_AS[case["id"]]


def test_the_sound_of_a_video_case_is_its_tone() -> None:
    video = CASES / "public" / "video" / "vid_with_audio.mp4"
    if not video.exists():
        pytest.skip("the shared cases are not beside this checkout")
    samples = AudioReader(max_seconds=600).sound_of_video(memoryview(video.read_bytes()), RATE)
    assert samples is not None
    assert len(samples) == RATE
    assert dominant_hz(samples) == pytest.approx(440, abs=1)


def test_a_video_case_without_sound_has_none() -> None:
    video = CASES / "public" / "video" / "vid_no_audio_use_audio.mp4"
    if not video.exists():
        pytest.skip("the shared cases are not beside this checkout")
    assert AudioReader(max_seconds=600).sound_of_video(memoryview(video.read_bytes()), RATE) is None


def test_the_cases_are_there() -> None:
    if not CASES.exists():
        pytest.skip("the shared cases are not beside this checkout")
    assert len(audio_cases()) > 25


def dominant_hz(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))
