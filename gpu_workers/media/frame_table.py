"""The frames that a video file shows, in display order, and which packets are needed for some of them.

Called by `video`. A header's frame count is a hint (0 in Matroska and MPEG-TS, all stored frames where an
edit list hides some, the old number where the file was cut), so frames are found by reading every packet,
which decodes nothing. That is only believed where one packet is one frame and nothing looks damaged;
otherwise every frame is decoded once to be counted.
"""

import bisect
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

import av
import av.container
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from gpu_workers.errors import ItemError
from gpu_workers.media.container import open_container, video_stream
from gpu_workers.media.h264 import holds_idr
from shm.errors import ErrorCode

# Decoders that give one frame for each packet. VP8 hides frames, MPEG-4 in AVI packs two into one packet.
_PACKET_IS_FRAME: Final = frozenset(
    ("h264", "hevc", "vp9", "libvpx-vp9", "av1", "libdav1d", "libaom-av1", "mjpeg", "prores", "ffv1")
)
# Where packets carry true presentation times. AVI numbers them in decoding order.
_TIMED_FORMATS: Final = frozenset(("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"))
# Ending one run of packets and starting another costs about as much as decoding this many between them.
_GAP_WORTH_SKIPPING: Final = 8
_QUARTER_TURNS: Final = 4
DEFAULT_FPS: Final = Fraction(24)


class Packed(NamedTuple):
    """One packet of the video stream, in the file's (decoding) order. pts in units of the time base."""

    pts: int | None
    is_keyframe: bool  # decoding can start here and be exact
    is_hidden: bool  # decoded for the others' sake and not shown: an edit list
    is_corrupt: bool


@dataclass(frozen=True, slots=True)
class FrameTable:
    """pts, times_s: of each shown frame, in display order; times_s starts at 0, pts is empty if counted.

    packets: all of the file, empty if counted. width, height: as stored, pixels. quarter_turns: to turn a
    stored frame upright, counterclockwise. damaged: frames are missing behind the last one here.
    """

    pts: tuple[int, ...]
    times_s: tuple[float, ...]
    packets: tuple[Packed, ...]
    fps: Fraction
    width: int
    height: int
    quarter_turns: int
    damaged: bool = False

    @property
    def counted(self) -> bool:
        """Frames are known by the order in which a decoder gives them, not by their pts."""
        return not self.packets

    def packets_for(self, wanted: Collection[int]) -> list[bool]:
        """Which packets to decode, in file order, to get exactly these display indices.

        A group starts at a keyframe. Pictures that are shown before their group's keyframe refer to the group
        before it, so that one is decoded too.
        """
        wanted_pts = {self.pts[index] for index in wanted}
        needed = [False] * len(self.packets)
        groups = [place for place, packet in enumerate(self.packets) if packet.is_keyframe or place == 0]
        for place, packet in enumerate(self.packets):
            if packet.pts not in wanted_pts:
                continue
            group = bisect.bisect_right(groups, place) - 1
            keyframe_pts = self.packets[groups[group]].pts
            leads = packet.pts is not None and keyframe_pts is not None and packet.pts < keyframe_pts
            first = groups[max(group - 1, 0)] if leads else groups[group]
            needed[first : place + 1] = [True] * (place + 1 - first)
        return _without_small_gaps(needed)


@dataclass(frozen=True, slots=True)
class FirstFrame:
    """What only a decoded frame tells. width, height: as stored."""

    width: int
    height: int
    quarter_turns: int

    @classmethod
    def of(cls, frame: VideoFrame) -> "FirstFrame":
        """The display matrix is rounded to quarter turns."""
        return cls(frame.width, frame.height, round(frame.rotation / 90) % _QUARTER_TURNS)


def read_table(data: memoryview, max_pixels: int, max_seconds: int) -> FrameTable:
    """Of a container's video stream. ItemError if there is none, no frame can be had or it is too long, or
    its frames are too large, by the header before anything is decoded."""
    with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
        stream = video_stream(container)
        check_pixels(stream.width, stream.height, max_pixels)
        packets, first = _scan(container, stream)
        pts = sorted(packet.pts for packet in packets if packet.pts is not None and not packet.is_hidden)
        if first is not None and _is_plain(stream, packets, pts):
            times_s = _seconds(pts, stream)
            _check_length(times_s[-1], max_seconds)
            return _table(stream, first, pts=pts, times_s=times_s, packets=packets)
        cut = len(packets) < stream.frames or any(packet.is_corrupt for packet in packets)
    table = _count(data, max_seconds)
    check_pixels(table.width, table.height, max_pixels)
    return replace(table, damaged=cut or 0 < len(table.times_s) < len(pts))


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """ItemError if a frame is larger."""
    if width * height > max_pixels:
        raise ItemError(ErrorCode.TOO_MANY_PIXELS, width * height, max_pixels)


def first_frame(container: av.container.InputContainer, stream: VideoStream) -> FirstFrame:
    """Decoded from the start of the file, one thread. ItemError if no frame can be decoded."""
    for frame in decoded_frames(container, stream):
        return FirstFrame.of(frame)
    raise ItemError(ErrorCode.DECODE_FAILED)


def frame_rate(stream: VideoStream) -> Fraction:
    """The container's average rate, as Hugging Face's reader takes it; 24 where the file does not say."""
    rate = stream.average_rate
    return rate if rate is not None and rate > 0 else DEFAULT_FPS


def decoded_frames(container: av.container.InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Every good frame in display order, up to the first damage. Packets before the first frame may fail:
    a recording can start in the middle of a group."""
    started = False
    lost_pts: int | None = None
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                lost_pts = packet.pts
                break
            try:
                frames = packet.decode() if packet.size else []
            except av.FFmpegError:
                if started:
                    lost_pts = packet.pts
                    break
                continue
            for frame in frames:
                started = True
                yield frame
    except av.FFmpegError:  # the container itself is damaged from here on
        pass
    yield from _held_back(stream, lost_pts)


def _held_back(stream: VideoStream, lost_pts: int | None) -> Iterator[VideoFrame]:
    """What the decoder still holds to put frames in order; after damage, what is shown before it."""
    for frame in drain(stream):
        if lost_pts is None or frame.pts is None or frame.pts < lost_pts:
            yield frame


def drain(stream: VideoStream) -> list[VideoFrame]:
    """End the decoder's input and take what it holds. It can start again at a keyframe afterwards."""
    try:
        frames = stream.codec_context.decode(None)
    except (av.FFmpegError, EOFError):
        frames = []
    stream.codec_context.flush_buffers()
    return [frame for frame in frames if not frame.is_corrupt]


def _scan(
    container: av.container.InputContainer, stream: VideoStream
) -> tuple[list[Packed], FirstFrame | None]:
    """Every packet, and the first shown frame, for which as few of them as possible are decoded."""
    packets: list[Packed] = []
    first: FirstFrame | None = None
    stream.codec_context.thread_count = 1
    try:
        for packet in container.demux(stream):
            if packet.size:
                packets.append(
                    Packed(packet.pts, _starts_afresh(packet), packet.is_discard, packet.is_corrupt)
                )
            if first is None:
                first = _try_first(packet)
    except av.FFmpegError:  # the container is damaged from here on
        packets.append(Packed(None, is_keyframe=False, is_hidden=False, is_corrupt=True))
    return packets, first


def _try_first(packet: "Packet[VideoStream]") -> FirstFrame | None:
    """The last packet of a demuxer is empty and makes the decoder give what it holds."""
    try:
        frames = packet.decode()
    except (av.FFmpegError, EOFError):
        return None
    return FirstFrame.of(frames[0]) if frames else None


def _starts_afresh(packet: "Packet[VideoStream]") -> bool:
    """Whether what follows refers to nothing before. H.264 files also flag pictures from which a decoder
    recovers step by step; only an IDR picture will do."""
    if not packet.is_keyframe or packet.stream.codec_context.name != "h264":
        return packet.is_keyframe
    return holds_idr(bytes(packet), packet.stream.codec_context.extradata)


def _is_plain(stream: VideoStream, packets: Sequence[Packed], pts: Sequence[int]) -> bool:
    """Whether a decoder will give exactly the frames of these packets."""
    return (
        stream.codec_context.name in _PACKET_IS_FRAME
        and stream.container.format.name in _TIMED_FORMATS
        and len(pts) > 0
        and stream.frames in (0, len(packets))
        and packets[0].is_keyframe
        and all(packet.pts is not None and not packet.is_corrupt for packet in packets)
        and len(set(pts)) == len(pts)
        and min(packet.pts or 0 for packet in packets) == (packets[0].pts or 0)
    )


def _count(data: memoryview, max_seconds: int) -> FrameTable:
    """The table by decoding everything, with one thread: what it gives then does not depend on timing."""
    with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
        stream = video_stream(container)
        stream.codec_context.thread_count = 1
        first: FirstFrame | None = None
        pts: list[int | None] = []
        for frame in decoded_frames(container, stream):
            first = first or FirstFrame.of(frame)
            pts.append(frame.pts)
            _check_length(_seconds_after(pts[0], frame.pts, len(pts) - 1, stream), max_seconds)
        if first is None:
            raise ItemError(ErrorCode.DECODE_FAILED)
        times_s = _seconds(pts, stream)
        return _table(stream, first, pts=[], times_s=times_s, packets=[])


def _table(
    stream: VideoStream,
    first: FirstFrame,
    *,
    pts: Sequence[int],
    times_s: Sequence[float],
    packets: Sequence[Packed],
) -> FrameTable:
    return FrameTable(
        pts=tuple(pts),
        times_s=tuple(times_s),
        packets=tuple(packets),
        fps=frame_rate(stream),
        width=first.width,
        height=first.height,
        quarter_turns=first.quarter_turns,
    )


def _seconds(pts: Sequence[int | None], stream: VideoStream) -> list[float]:
    """Presentation times of frames in display order; by the frame rate if the file's go back or stand."""
    times_s = [_seconds_after(pts[0], value, index, stream) for index, value in enumerate(pts)]
    if all(earlier < later for earlier, later in pairwise(times_s)):
        return times_s
    return [float(index / frame_rate(stream)) for index in range(len(pts))]


def _seconds_after(first: int | None, pts: int | None, index: int, stream: VideoStream) -> float:
    """Since the first frame; by the frame rate where the file has no presentation times."""
    if first is None or pts is None or stream.time_base is None:
        return float(index / frame_rate(stream))
    return float((pts - first) * stream.time_base)


def _check_length(seconds: float, max_seconds: int) -> None:
    if seconds > max_seconds:
        raise ItemError(ErrorCode.TOO_LONG, math.ceil(seconds), max_seconds)


def _without_small_gaps(needed: list[bool]) -> list[bool]:
    """Gaps too short to be worth ending a run for are decoded through."""
    filled = list(needed)
    last_needed = -1
    for place, is_needed in enumerate(needed):
        if not is_needed:
            continue
        if last_needed >= 0 and place - last_needed - 1 < _GAP_WORTH_SKIPPING:
            filled[last_needed + 1 : place] = [True] * (place - last_needed - 1)
        last_needed = place
    return filled
