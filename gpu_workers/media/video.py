"""Videos: encoded bytes -> the sampled frames, upright, RGB, and when each is shown.

Called by families. The family chooses the frames: Hugging Face's video processors each have their own rule,
so `plan` takes it as a function of the metadata that those processors want. The plan is exact: what it says
of size, frames and times is what `rgb` gives, or an ItemError. Animated GIF and WebP are read by Pillow.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from gpu_workers.errors import ItemError
from gpu_workers.media.animation import Animation, is_animation
from gpu_workers.media.container import open_container, silence_ffmpeg, video_stream
from gpu_workers.media.frame_table import (
    DEFAULT_FPS,
    FrameTable,
    check_pixels,
    decoded_frames,
    drain,
    first_frame,
    frame_rate,
    read_table,
)
from gpu_workers.media.image import Background, ImageReader, RgbPixels
from gpu_workers.media.video_plan import (
    Choose,
    VideoLimits,
    VideoMetadata,
    VideoPlan,
    VideoProbe,
    chosen,
    upright_size,
)
from shm.errors import ErrorCode

RgbFrames: TypeAlias = npt.NDArray[np.uint8]  # (frames, height, width, 3)

# Several threads decode a video with at least this much to decode; below, they cost more than they give.
_THREADS_WORTH_PIXELS: Final = 16_000_000


class VideoReader:
    """Reads videos under one policy. Any number of threads may use it at once."""

    def __init__(self, limits: VideoLimits, background: Background, decode_threads: int) -> None:
        """background: below transparent pixels of animations and listed pictures."""
        silence_ffmpeg()
        self._limits = limits
        self._background = background
        self._decode_threads = decode_threads
        self._pictures = ImageReader(limits.max_pixels, background)

    def probe(self, data: memoryview) -> VideoProbe:
        """A first look. ItemError if this is no video that we take, or its frames are too large."""
        if is_animation(data):
            animation = self._animation(data)
            return VideoProbe(
                animation.width,
                animation.height,
                len(animation.times_s),
                float(animation.fps),
                animation.duration_s,
                has_audio=False,
            )
        with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
            stream = video_stream(container)
            check_pixels(stream.width, stream.height, self._limits.max_pixels)
            first = first_frame(container, stream)
            width, height = upright_size(first.width, first.height, first.quarter_turns)
            return VideoProbe(
                width,
                height,
                stream.frames,
                float(frame_rate(stream)),
                None if container.duration is None else container.duration / av.time_base,
                has_audio=len(container.streams.audio) > 0,
            )

    def plan(self, data: memoryview, choose: Choose) -> VideoPlan:
        """Find the frames and choose. Decodes the first frame only, or every frame once if the file is
        damaged or of a kind whose frames cannot be counted otherwise. A lone frame is chosen unasked."""
        if is_animation(data):
            animation = self._animation(data)
            return self._plan(
                choose, animation.fps, animation.width, animation.height, animation.times_s, table=None
            )
        table = read_table(data, self._limits.max_pixels, self._limits.max_seconds)
        if table.damaged and len(table.times_s) < self._limits.min_frames:
            raise ItemError(ErrorCode.TOO_FEW_FRAMES, len(table.times_s), self._limits.min_frames)
        width, height = upright_size(table.width, table.height, table.quarter_turns)
        return self._plan(choose, table.fps, width, height, table.times_s, table)

    def plan_pictures(
        self, pictures: Sequence[memoryview], choose: Choose, fps: float | None = None
    ) -> VideoPlan:
        """A list of encoded pictures is one video, shown at fps (24 unless the client knows better)."""
        if not pictures:
            raise ItemError(ErrorCode.EMPTY_ITEM)
        sizes = [self._pictures.size(picture) for picture in pictures]
        if any(size != sizes[0] for size in sizes):
            raise ItemError(ErrorCode.FRAME_SIZES_DIFFER)
        rate = DEFAULT_FPS if fps is None else Fraction(fps)
        times_s = [float(index / rate) for index in range(len(pictures))]
        return self._plan(choose, rate, sizes[0].width, sizes[0].height, times_s, table=None)

    def rgb(self, data: memoryview, plan: VideoPlan) -> RgbFrames:
        """All chosen frames, plan.shape. ItemError also for damage that the plan could not see."""
        return self._gather(plan, self.each(data, plan))

    def each(self, data: memoryview, plan: VideoPlan) -> Iterator[tuple[int, RgbPixels]]:
        """(place in plan.indices, pixels (height, width, 3)) as they are decoded, each place once: for those
        who make a frame smaller before they take the next."""
        places = _places(plan.indices)
        if plan.table is None:
            frames = self._animation(data).frames(plan.indices, self._background)
        else:
            frames = self._decode(data, plan.table, set(places))
        for index, pixels in frames:
            for place in places.pop(index, ()):
                yield place, pixels
            if not places:
                return
        raise ItemError(ErrorCode.DECODE_FAILED)

    def rgb_of_pictures(self, pictures: Sequence[memoryview], plan: VideoPlan) -> RgbFrames:
        """The chosen ones of plan_pictures's pictures, plan.shape."""
        chosen = (self._pictures.rgb(pictures[index]) for index in plan.indices)
        return self._gather(plan, enumerate(chosen))

    def _plan(
        self,
        choose: Choose,
        fps: Fraction,
        width: int,
        height: int,
        times_s: Sequence[float],
        table: FrameTable | None,
    ) -> VideoPlan:
        if times_s[-1] > self._limits.max_seconds:
            raise ItemError(ErrorCode.TOO_LONG, math.ceil(times_s[-1]), self._limits.max_seconds)
        metadata = VideoMetadata(len(times_s), float(fps), width, height, float(len(times_s) / fps))
        indices = chosen(metadata, choose)
        if len(indices) > self._limits.max_frames:
            raise ItemError(ErrorCode.TOO_MANY_FRAMES, len(indices), self._limits.max_frames)
        return VideoPlan(
            replace(metadata, frames_indices=indices), tuple(times_s[index] for index in indices), table
        )

    def _gather(self, plan: VideoPlan, frames: Iterator[tuple[int, RgbPixels]]) -> RgbFrames:
        if math.prod(plan.shape[:3]) > self._limits.max_total_pixels:
            raise ItemError(
                ErrorCode.TOO_MANY_PIXELS, math.prod(plan.shape[:3]), self._limits.max_total_pixels
            )
        rgb = np.empty(plan.shape, np.uint8)
        for place, pixels in frames:
            rgb[place] = pixels
        return rgb

    def _decode(
        self, data: memoryview, table: FrameTable, wanted: set[int]
    ) -> Iterator[tuple[int, RgbPixels]]:
        """(index, pixels) of the wanted frames of a container. Runs of packets between keyframes are skipped;
        where that loses a frame, because a keyframe was none, everything is decoded from the start."""
        if table.counted:
            yield from self._decode_counted(data, table, wanted)
            return
        needed = table.packets_for(wanted)
        missing = set(wanted)
        for index, pixels in self._decode_runs(data, table, needed, wanted):
            missing.discard(index)
            yield index, pixels
        if missing and not all(needed):
            yield from self._decode_runs(data, table, [True] * len(needed), missing)

    def _decode_runs(
        self, data: memoryview, table: FrameTable, needed: Sequence[bool], wanted: set[int]
    ) -> Iterator[tuple[int, RgbPixels]]:
        index_of = {table.pts[index]: index for index in wanted}
        upright = _Upright(table)
        with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
            stream = video_stream(container)
            self._use_threads(stream, table, sum(needed))
            for frame in _frames_of_runs(container, stream, needed):
                if frame.pts in index_of:
                    yield index_of[frame.pts], upright.rgb(frame)

    def _decode_counted(
        self, data: memoryview, table: FrameTable, wanted: set[int]
    ) -> Iterator[tuple[int, RgbPixels]]:
        """Exactly as the table was made: one thread, from the start."""
        upright = _Upright(table)
        with open_container(data, ErrorCode.NOT_A_VIDEO) as container:
            stream = video_stream(container)
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(decoded_frames(container, stream)):
                if index in wanted:
                    yield index, upright.rgb(frame)

    def _use_threads(self, stream: VideoStream, table: FrameTable, packets: int) -> None:
        if table.width * table.height * packets < _THREADS_WORTH_PIXELS:
            stream.codec_context.thread_count = 1
            return
        stream.codec_context.thread_type = "AUTO"
        stream.codec_context.thread_count = self._decode_threads

    def _animation(self, data: memoryview) -> Animation:
        animation = Animation(data, self._limits.max_pixels)
        if animation.damaged and len(animation.times_s) < self._limits.min_frames:
            raise ItemError(ErrorCode.TOO_FEW_FRAMES, len(animation.times_s), self._limits.min_frames)
        return animation


class _Upright:
    """Turns decoded frames of one video into upright RGB."""

    def __init__(self, table: FrameTable) -> None:
        self._stored = (table.width, table.height)
        self._quarter_turns = table.quarter_turns
        self._reformatter = VideoReformatter()  # one for all frames: it keeps FFmpeg's tables

    def rgb(self, frame: VideoFrame) -> RgbPixels:
        """As Hugging Face's frame.to_ndarray(format="rgb24"), then turned. ItemError if the size changed."""
        if (frame.width, frame.height) != self._stored:
            raise ItemError(ErrorCode.FRAME_SIZES_DIFFER)
        pixels = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        return np.rot90(pixels, self._quarter_turns).astype(np.uint8, copy=False)


def _frames_of_runs(
    container: InputContainer, stream: VideoStream, needed: Sequence[bool]
) -> Iterator[VideoFrame]:
    """Frames of the needed packets. A run ends in the decoder before the next one starts. Damage ends it all:
    the caller sees which frames are missing."""
    place = -1
    running = False
    last = len(needed) - 1 - list(reversed(needed)).index(True)
    try:
        for packet in container.demux(stream):
            if not packet.size:
                continue
            place += 1
            if place > last:
                break
            if needed[place]:
                yield from (frame for frame in packet.decode() if not frame.is_corrupt)
            elif running:
                yield from drain(stream)
            running = needed[place]
    except av.FFmpegError:
        return
    yield from drain(stream)


def _places(indices: Sequence[int]) -> dict[int, list[int]]:
    """Index of a frame -> where it stands among the chosen."""
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(index, []).append(place)
    return places
