"""Sound: encoded bytes -> mono float32 samples at the model's rate.

Called by families. Plain files are read by libsndfile, everything else (and what libsndfile gives up on) by
FFmpeg. Channels are averaged, which neither adds nor takes gain, before soxr resamples as librosa does it:
quality HQ, ceil(samples * rate / native rate) samples. Integer PCM is divided by its full scale.
"""

import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import av
import av.container
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from gpu_workers.errors import ItemError
from gpu_workers.media.container import MemoryFile, open_container, silence_ffmpeg
from shm.errors import ErrorCode

Samples: TypeAlias = npt.NDArray[np.float32]  # (samples,), mono

# Beginnings (offset, bytes) of what libsndfile is asked to read; it knows stranger formats too.
_PLAIN_MAGIC: Final = (
    (0, b"RIFF"),
    (0, b"RIFX"),
    (0, b"RF64"),
    (0, b"riff"),
    (0, b"FORM"),
    (0, b".snd"),
    (0, b"caff"),
    (0, b"fLaC"),
    (0, b"OggS"),
    (0, b"ID3"),
    (0, b"\xff\xfb"),
    (0, b"\xff\xf3"),
    (0, b"\xff\xf2"),
    (0, b"\xff\xfa"),
)
# Encodings of a fixed number of bits for each sample, so that the header's count, which libsndfile holds
# against the file's size, is exact. FLAC's is a promise: a file that breaks it is refused.
_COUNTED_ENCODINGS: Final = frozenset(
    ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
)
_UNKNOWN_COUNT: Final = 1 << 40  # libsndfile's "until the end" is larger than this
_BLOCK_FRAMES: Final = 65536
_LONGEST_CODEC_BLOCK: Final = 4096
_MAX_NATIVE_RATE: Final = 768_000


class AudioReader:
    """Reads sound under one policy. Any number of threads may use it at once."""

    def __init__(self, max_seconds: int) -> None:
        """max_seconds: of the longest sound."""
        silence_ffmpeg()
        self._max_seconds = max_seconds

    def probe_audio(self, data: memoryview, rate: int) -> int | None:
        """How many samples `samples` will return, without decoding. Exact: `samples` returns that many or
        raises ItemError. None where only decoding tells: everything but PCM, float and companded samples in
        WAV, AIFF, AU, CAF, W64 and RF64, and FLAC whose header counts. ItemError if the header refuses."""
        if len(data) == 0:
            raise ItemError(ErrorCode.EMPTY_ITEM)
        file = _open_plain(data)
        if file is None:
            return None
        with file:
            if not _is_counted(file):
                return None
            self._check_frames(file.frames, file.samplerate)
            return _resampled_count(file.frames, file.samplerate, rate)

    def samples(self, data: memoryview, rate: int) -> Samples:
        """The whole sound at `rate` Hz. ItemError if there is none, it is damaged, empty, too long or holds
        NaN or infinity. Of a damaged file whose samples were not counted beforehand: what decodes."""
        if len(data) == 0:
            raise ItemError(ErrorCode.EMPTY_ITEM)
        file = _open_plain(data)
        if file is not None:
            with file:
                mono = self._read_plain(file)
                native_rate = file.samplerate
            if mono is not None:
                return _resampled(mono, native_rate, rate)
        with open_container(data, ErrorCode.NOT_AUDIO) as container:
            return self._read_container(container, rate)

    def sound_of_video(self, data: memoryview, rate: int) -> Samples | None:
        """The first audio track of a video file at `rate` Hz, from the track's first sample on; None if it
        has no track, or a track without a sample."""
        with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
            if not container.streams.audio:
                return None
            try:
                return self._read_container(container, rate)
            except ItemError as error:
                if error.code is ErrorCode.EMPTY_ITEM:
                    return None
                raise

    def _read_plain(self, file: soundfile.SoundFile) -> Samples | None:
        """Mono at the native rate. None if libsndfile fails within an uncounted file: FFmpeg may not."""
        counted = _is_counted(file)
        if counted:
            self._check_frames(file.frames, file.samplerate)
        blocks: list[Samples] = []
        total = 0
        try:
            while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                blocks.append(_mean_of_channels(block))
                total += len(block)
                self._check_length(total, file.samplerate)
        except soundfile.LibsndfileError:
            if not counted:
                return None
            raise ItemError(ErrorCode.TRUNCATED) from None
        if counted and total != file.frames:
            raise ItemError(ErrorCode.TRUNCATED)
        return _joined(blocks)

    def _read_container(self, container: av.container.InputContainer, rate: int) -> Samples:
        if not container.streams.audio:
            raise ItemError(ErrorCode.NO_AUDIO_STREAM)
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT)
        blocks: list[Samples] = []
        native_rate = total = 0
        for frame in _decoded_frames(container, stream):
            native_rate = native_rate or frame.sample_rate
            if frame.sample_rate != native_rate:
                raise ItemError(ErrorCode.DECODE_FAILED)
            blocks.append(_mono(frame))
            total += frame.samples
            self._check_length(total, native_rate)
        mono = _without_padding(_joined(blocks), container, stream, native_rate)
        return _resampled(mono, native_rate, rate)

    def _check_frames(self, frames: int, native_rate: int) -> None:
        if frames == 0:
            raise ItemError(ErrorCode.EMPTY_ITEM)
        self._check_length(frames, native_rate)

    def _check_length(self, frames: int, native_rate: int) -> None:
        if not 0 < native_rate <= _MAX_NATIVE_RATE:
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT)
        if frames > self._max_seconds * native_rate:
            raise ItemError(ErrorCode.TOO_LONG, math.ceil(frames / native_rate), self._max_seconds)


def _open_plain(data: memoryview) -> soundfile.SoundFile | None:
    """None if libsndfile should not, or cannot, read it."""
    head = bytes(data[:4])
    if not any(head[offset : offset + len(magic)] == magic for offset, magic in _PLAIN_MAGIC):
        return None
    try:
        file = soundfile.SoundFile(MemoryFile(data))
    except (soundfile.SoundFileError, TypeError, ValueError):
        return None
    if file.frames == 0 and _was_never_closed(data):
        file.close()
        return None
    return file


def _was_never_closed(data: memoryview) -> bool:
    """A WAV whose writer left the lengths at zero: there is more than the header says. FFmpeg reads on."""
    riff_bytes = int.from_bytes(data[4:8], "little")
    return bytes(data[:4]) == b"RIFF" and (riff_bytes == 0xFFFFFFFF or riff_bytes + 8 < len(data))


def _is_counted(file: soundfile.SoundFile) -> bool:
    if file.format == "FLAC":
        return bool(0 < file.frames < _UNKNOWN_COUNT)
    return bool(file.subtype in _COUNTED_ENCODINGS and file.frames < _UNKNOWN_COUNT)


def _decoded_frames(container: av.container.InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    """Every frame up to the first damage; packets before the first frame may fail. ItemError if damage is
    all there is."""
    started = damaged = False
    try:
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.FFmpegError:
                damaged = True
                if started:
                    break
                continue
            for frame in frames:
                started = True
                yield frame
    except av.FFmpegError:  # the container itself is damaged from here on
        damaged = True
    if damaged and not started:
        raise ItemError(ErrorCode.DECODE_FAILED)


def _mean_of_channels(block: npt.NDArray[np.float32]) -> Samples:
    """block.mean(axis=1), to the bit. numpy walks rows of one or two elements several times as slowly."""
    mono: Samples
    if block.shape[1] == 1:
        mono = block[:, 0]
    elif block.shape[1] == 2:
        mono = (block[:, 0] + block[:, 1]) / np.float32(2)
    else:
        mono = block.mean(axis=1, dtype=np.float32)
    return mono


def _mono(frame: AudioFrame) -> Samples:
    """Average of the channels, full scale 1. Packed frames interleave their channels in one row."""
    try:
        values: npt.NDArray[Any] = frame.to_ndarray()
    except ValueError:  # 64-bit integers
        raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None
    if frame.format.is_packed:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if values.dtype == np.uint8:
        scaled = (values.astype(np.float32) - 128) / 128
    elif np.issubdtype(values.dtype, np.integer):
        scaled = (values / -float(np.iinfo(values.dtype).min)).astype(np.float32)
    else:
        scaled = values.astype(np.float32)
    mono: Samples = scaled.mean(axis=0, dtype=np.float32)
    return mono


def _without_padding(
    mono: Samples, container: av.container.InputContainer, stream: AudioStream, native_rate: int
) -> Samples:
    """MP4 says how many samples of the encoder's last block are sound; PyAV's decoder returns all of it."""
    if not container.format.name.startswith("mov") or stream.duration is None or stream.time_base is None:
        return mono
    sound = round(stream.duration * stream.time_base * native_rate)
    return mono[:sound] if 0 < sound < len(mono) < sound + _LONGEST_CODEC_BLOCK else mono


def _joined(blocks: list[Samples]) -> Samples:
    """ItemError for no samples, and for any that is no number: it would spread over the whole embedding."""
    if not blocks:
        raise ItemError(ErrorCode.EMPTY_ITEM)
    mono = np.concatenate(blocks)
    if len(mono) == 0:
        raise ItemError(ErrorCode.EMPTY_ITEM)
    if not np.isfinite(mono).all():
        raise ItemError(ErrorCode.NOT_FINITE)
    return mono


def _resampled(mono: Samples, native_rate: int, rate: int) -> Samples:
    if native_rate == rate:
        return mono
    count = _resampled_count(len(mono), native_rate, rate)
    resampled = soxr.resample(mono, native_rate, rate, quality="HQ")[:count]
    # soxr gives one sample less where the length is not a whole number.
    return np.pad(resampled, (0, count - len(resampled))).astype(np.float32, copy=False)


def _resampled_count(frames: int, native_rate: int, rate: int) -> int:
    return -(-frames * rate // native_rate)
