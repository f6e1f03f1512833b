"""Media containers: encoded bytes in memory, opened by FFmpeg without reach to anything outside them.

Called by `video`, `frame_table` and `audio`. FFmpeg knows 300 formats; some of them name other files and
addresses (playlists, concat scripts). Only those in _FORMATS are tried, no protocol is allowed and every
attempt to open something else fails. FFmpeg's messages go nowhere: the error code says what they would.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import av
import av.container
from av.stream import Disposition
from av.video.stream import VideoStream

from gpu_workers.errors import ItemError
from shm.errors import ErrorCode

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Demuxers by FFmpeg's names. None of these opens a second file when told not to (enable_drefs stays off).
_FORMATS: Final = ",".join(
    (
        "mov,mp4,m4a,3gp,3g2,mj2",
        "matroska,webm",
        "avi",
        "flv",
        "mpegts",
        "mpeg",
        "mpegvideo",
        "m4v",
        "h264",
        "hevc",
        "obu",
        "ivf",
        "ogg",
        "asf",
        "mxf",
        "nut",
        "yuv4mpegpipe",
        "mjpeg",
        "wav",
        "w64",
        "aiff",
        "au",
        "caf",
        "flac",
        "mp3",
        "aac",
        "ac3",
        "eac3",
        "amr",
        "amrnb",
        "amrwb",
        "ape",
        "wv",
        "tta",
    )
)
_READ_BYTES: Final = 256 * 1024
# Beginnings (offset, bytes) of containers that we take: what starts so and cannot be opened is damaged.
_KNOWN_MAGIC: Final = (
    (4, b"ftyp"),
    (4, b"moov"),
    (4, b"mdat"),
    (0, b"\x1aE\xdf\xa3"),
    (0, b"RIFF"),
    (0, b"OggS"),
    (0, b"FLV"),
    (0, b"fLaC"),
    (0, b"ID3"),
    (0, b"\x47\x40"),
    (0, b"\0\0\x01\xba"),
)


class MemoryFile(io.RawIOBase):
    """A read-only file over borrowed memory: what is read is copied, the whole never is."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Copy the next bytes into buffer; 0 at the end."""
        target = memoryview(buffer)
        taken = self._data[self._position : self._position + len(target)]
        target[: len(taken)] = taken
        self._position += len(taken)
        return len(taken)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As io.IOBase.seek, but before the start is the start: parsers of damaged files ask for it, and an
        exception would end up on stderr."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(base + offset, 0)
        return self._position


def silence_ffmpeg() -> None:
    """FFmpeg's log, off for the process. PyAV's default, which other code may have changed."""
    av.logging.set_level(None)


@contextmanager
def open_container(data: memoryview, not_this: ErrorCode) -> Iterator[av.container.InputContainer]:
    """Headers read; nothing decoded is kept. ItemError with not_this if the bytes are nothing we know."""
    if len(data) == 0:
        raise ItemError(ErrorCode.EMPTY_ITEM)
    try:
        container = av.open(
            MemoryFile(data),
            mode="r",
            options={"format_whitelist": _FORMATS, "protocol_whitelist": "none"},
            metadata_errors="replace",
            buffer_size=_READ_BYTES,
            io_open=_refuse_to_open,
        )
    except (av.FFmpegError, OSError, ValueError):  # out of memory too: a header that claims gigabytes
        raise ItemError(_why_not_opened(bytes(data[:16]), not_this)) from None
    with container:
        yield container


def video_stream(container: av.container.InputContainer) -> VideoStream:
    """The first moving picture (cover art is none). ItemError if there is none, or no decoder for it."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise ItemError(ErrorCode.UNSUPPORTED_FORMAT)
            return stream
    raise ItemError(ErrorCode.NO_VIDEO_STREAM)


def _refuse_to_open(*_: object) -> NoReturn:
    raise OSError("media may not open other media")


def _why_not_opened(head: bytes, not_this: ErrorCode) -> ErrorCode:
    """From the first bytes: damaged, or not what was asked for."""
    if any(head[offset : offset + len(magic)] == magic for offset, magic in _KNOWN_MAGIC):
        return ErrorCode.DECODE_FAILED
    return not_this
