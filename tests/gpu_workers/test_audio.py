"""The audio reader: scaling, headers that lie, exact counts, resampling, containers, damage."""

import io
import random
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr

from gpu_workers.errors import ItemError
from gpu_workers.media.audio import AudioReader
from shm.errors import ErrorCode
from tests.gpu_workers.video_files import encode

RATE = 16000
Waves = npt.NDArray[np.float32]


def tone(samples: int, rate: int = RATE, hz: float = 440.0, amplitude: float = 0.4) -> Waves:
    return (amplitude * np.sin(2 * np.pi * hz * np.arange(samples) / rate)).astype(np.float32)


def written(samples: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> memoryview:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return memoryview(file.getvalue())


def wav(
    content: bytes,
    *,
    channels: int = 1,
    bits: int = 16,
    rate: int = RATE,
    data_bytes: int | None = None,
    riff_bytes: int | None = None,
    before: bytes = b"",
    after: bytes = b"",
) -> memoryview:
    """A PCM file whose sizes are as given, true or not. before, after: chunks around the data chunk."""
    align = channels * bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * align, align, bits)
    sound = struct.pack("<4sI", b"data", len(content) if data_bytes is None else data_bytes) + content
    body = b"WAVE" + form + before + sound + after
    return memoryview(struct.pack("<4sI", b"RIFF", len(body) if riff_bytes is None else riff_bytes) + body)


def pcm16(samples: Waves) -> bytes:
    return np.round(samples * 32767).astype("<i2").tobytes()


@pytest.fixture
def reader() -> AudioReader:
    return AudioReader(max_seconds=600)


def refusal(reader: AudioReader, data: memoryview, rate: int = RATE) -> ItemError:
    with pytest.raises(ItemError) as error:
        reader.samples(data, rate)
    return error.value


@pytest.mark.parametrize(
    ("kind", "subtype", "step"),
    [
        ("WAV", "PCM_U8", 1 / 128),
        ("WAV", "PCM_16", 1 / 32768),
        ("WAV", "PCM_24", 1 / 2**23),
        ("WAV", "PCM_32", 1 / 2**24),
        ("WAV", "FLOAT", 1 / 2**24),
        ("WAV", "DOUBLE", 1 / 2**24),
        ("WAVEX", "PCM_24", 1 / 2**23),
        ("AIFF", "PCM_16", 1 / 32768),
        ("AIFF", "PCM_S8", 1 / 128),
        ("AU", "PCM_16", 1 / 32768),
        ("CAF", "PCM_24", 1 / 2**23),
        ("W64", "PCM_16", 1 / 32768),
        ("RF64", "PCM_16", 1 / 32768),
        ("FLAC", "PCM_16", 1 / 32768),
        ("FLAC", "PCM_24", 1 / 2**23),
    ],
)
def test_every_width_of_sample_has_full_scale_one(
    reader: AudioReader, kind: str, subtype: str, step: float
) -> None:
    data = written(tone(1000), kind=kind, subtype=subtype)
    assert np.abs(reader.samples(data, RATE) - tone(1000)).max() <= step
    assert reader.probe_audio(data, RATE) == 1000


def test_channels_are_averaged(reader: AudioReader) -> None:
    left, right = tone(800), tone(800, hz=1000)
    both = written(np.stack([left, right], axis=1), subtype="FLOAT")
    assert np.array_equal(reader.samples(both, RATE), (left + right) / 2)
    six = written(np.stack([left] * 6, axis=1), subtype="FLOAT")
    assert np.abs(reader.samples(six, RATE) - left).max() < 1e-6


def test_channels_of_a_container_are_averaged_without_gain(reader: AudioReader) -> None:
    video = encode(range(10), sound=np.stack([tone(RATE)] * 2))
    samples = reader.samples(video, RATE)
    assert len(samples) == RATE
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.4 / np.sqrt(2), rel=0.02)


HEADERS_THAT_LIE = {
    "unknown length": {"data_bytes": 0xFFFFFFFF, "riff_bytes": 0xFFFFFFFF},
    "length never filled in": {"data_bytes": 0, "riff_bytes": 0},
    "length beyond the file": {"data_bytes": 1 << 20},
    "length never filled in by Python": {"data_bytes": 0, "riff_bytes": 36},
    "wrong file length": {"riff_bytes": 36},
    "a chunk before": {"before": struct.pack("<4sI", b"LIST", 10) + bytes(10)},
    "a chunk of odd length before": {"before": struct.pack("<4sI", b"junk", 3) + bytes(4)},
    "a chunk behind": {"after": struct.pack("<4sI", b"LIST", 3000) + b"\x7f" * 3000},
    "noise behind": {"after": b"\x7f" * 501},
}


@pytest.mark.parametrize("lie", HEADERS_THAT_LIE)
def test_a_wav_header_that_lies_changes_nothing(reader: AudioReader, lie: str) -> None:
    arguments: dict[str, Any] = HEADERS_THAT_LIE[lie]
    samples = reader.samples(wav(pcm16(tone(1000)), **arguments), RATE)
    assert len(samples) == 1000
    assert np.abs(samples - tone(1000)).max() <= 1 / 16384
    never_filled = arguments.get("data_bytes") == 0
    count = reader.probe_audio(wav(pcm16(tone(1000)), **arguments), RATE)
    assert count == (None if never_filled else 1000)


def test_an_empty_wav_with_a_chunk_behind_is_empty(reader: AudioReader) -> None:
    data = wav(b"", after=struct.pack("<4sI", b"LIST", 300) + b"\x7f" * 300)
    assert refusal(reader, data).code is ErrorCode.EMPTY_ITEM


def test_a_cut_wav_is_what_is_there(reader: AudioReader) -> None:
    data = wav(pcm16(tone(1000)))[: 44 + 1001]
    assert reader.probe_audio(data, RATE) == len(reader.samples(data, RATE)) == 500


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(reader: AudioReader, value: float) -> None:
    samples = tone(1000)
    samples[500] = value
    assert refusal(reader, written(samples, subtype="FLOAT")).code is ErrorCode.NOT_FINITE
    assert refusal(reader, written(samples, 44100, subtype="FLOAT")).code is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_no_sound_is_refused_as_empty(reader: AudioReader, kind: str) -> None:
    assert refusal(reader, written(np.zeros(0, np.float32), kind=kind)).code is ErrorCode.EMPTY_ITEM
    assert refusal(reader, memoryview(b"")).code is ErrorCode.EMPTY_ITEM


@pytest.mark.parametrize("native_rate", [8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000, 1, 767_999])
@pytest.mark.parametrize("rate", [16000, 24000])
def test_a_count_is_exact_at_every_rate(reader: AudioReader, native_rate: int, rate: int) -> None:
    source = random.Random(native_rate)
    for samples in [1, 2, 3, 159, 441, *(source.randrange(1, 550) for _ in range(5))]:
        data = written(tone(samples), native_rate, subtype="FLOAT")
        assert reader.probe_audio(data, rate) == len(reader.samples(data, rate))


def test_resampling_is_librosas(reader: AudioReader) -> None:
    sound = tone(44101, 44100)
    expected = soxr.resample(sound, 44100, RATE, quality="HQ")
    samples = reader.samples(written(sound, 44100, subtype="FLOAT"), RATE)
    assert len(samples) == 16001
    assert np.array_equal(samples[: len(expected)], expected)
    assert not samples[len(expected) :].any()


def test_the_same_bytes_give_the_same_samples(reader: AudioReader) -> None:
    data = written(tone(50_000, 44100), 44100, kind="OGG")
    assert np.array_equal(reader.samples(data, RATE), reader.samples(data, RATE))


@pytest.mark.parametrize("kind", ["MP3", "OGG"])
def test_a_lossy_file_is_not_counted_before_it_is_decoded(reader: AudioReader, kind: str) -> None:
    data = written(tone(30_000, 44100), 44100, kind=kind)
    assert reader.probe_audio(data, RATE) is None
    assert len(reader.samples(data, RATE)) == pytest.approx(30_000 * RATE / 44100, abs=1600)


def test_a_flac_that_does_not_count_is_read_to_its_end(reader: AudioReader) -> None:
    data = bytearray(written(tone(9000), kind="FLAC"))
    data[8 + 13] &= 0xF0  # the upper of the 36 bits of STREAMINFO's count
    data[8 + 14 : 8 + 18] = bytes(4)
    assert reader.probe_audio(memoryview(data), RATE) is None
    assert len(reader.samples(memoryview(data), RATE)) == 9000


def test_a_counted_file_that_breaks_its_promise_is_refused(reader: AudioReader) -> None:
    data = written(tone(50_000), kind="FLAC")
    assert refusal(reader, data[: len(data) // 2]).code is ErrorCode.TRUNCATED


def test_a_sound_over_the_limit_is_refused_with_both_numbers() -> None:
    reader = AudioReader(max_seconds=1)
    for kind in ("WAV", "FLAC", "OGG"):
        error = refusal(reader, written(tone(3 * RATE), kind=kind))
        assert (error.code, error.limit) == (ErrorCode.TOO_LONG, 1)
        assert error.value > 1
    video = encode(range(30), sound=tone(3 * RATE)[None])
    assert refusal(reader, video).code is ErrorCode.TOO_LONG
    with pytest.raises(ItemError) as probed:
        reader.probe_audio(written(tone(3 * RATE)), RATE)
    assert (probed.value.code, probed.value.value) == (ErrorCode.TOO_LONG, 3)


def test_samples_wider_than_any_sound_are_refused(reader: AudioReader) -> None:
    data = wav(np.zeros(100, "<i8").tobytes(), bits=64)
    assert refusal(reader, data).code is ErrorCode.UNSUPPORTED_FORMAT


def test_a_rate_that_no_sound_has_is_refused(reader: AudioReader) -> None:
    assert refusal(reader, wav(pcm16(tone(100)), rate=4_000_000)).code is ErrorCode.UNSUPPORTED_FORMAT


def test_a_video_has_sound_or_none(reader: AudioReader) -> None:
    with_sound = encode(range(10), sound=tone(RATE)[None])
    samples = reader.sound_of_video(with_sound, 24000)
    assert samples is not None
    assert len(samples) == 24000
    assert reader.sound_of_video(encode(range(10)), RATE) is None
    assert refusal(reader, encode(range(10))).code is ErrorCode.NO_AUDIO_STREAM
    with pytest.raises(ItemError) as error:
        reader.sound_of_video(memoryview(b"no video at all, only text"), RATE)
    assert error.value.code is ErrorCode.NOT_A_VIDEO


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_damage_ends_in_samples_as_counted_or_a_refusal(reader: AudioReader, kind: str) -> None:
    data = written(tone(20_000, 44100), 44100, kind=kind)
    for seed in range(40):
        source = random.Random(seed)
        damaged = bytearray(data[: source.randrange(1, len(data))] if seed % 2 else data)
        for _ in range(4):
            damaged[source.randrange(min(len(damaged), 200 if seed % 4 else 1 << 30))] ^= (
                1 << source.randrange(8)
            )
        try:
            count = reader.probe_audio(memoryview(damaged), RATE)
            samples = reader.samples(memoryview(damaged), RATE)
        except ItemError:
            continue
        assert count in (None, len(samples))
        assert np.isfinite(samples).all()
