"""Animated GIF and WebP as videos."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpu_workers.errors import ItemError
from gpu_workers.media.animation import Animation, is_animation
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits, VideoMetadata
from shm.errors import ErrorCode
from tests.gpu_workers.video_files import HEIGHT, WIDTH, number_of, numbered

MAX_PIXELS = 1_000_000


def animated(kind: str, count: int = 6, **options: Any) -> memoryview:
    pictures = [Image.fromarray(numbered(number)) for number in range(count)]
    file = io.BytesIO()
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], **options)
    return memoryview(file.getvalue())


def every_frame(metadata: VideoMetadata) -> range:
    return range(metadata.total_num_frames)


@pytest.fixture
def reader() -> VideoReader:
    return VideoReader(VideoLimits(MAX_PIXELS), background="white", decode_threads=1)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_frames_and_times_are_the_files(reader: VideoReader, kind: str) -> None:
    data = animated(kind, duration=[100, 200, 50, 50, 400, 200])
    plan = reader.plan(data, every_frame)
    assert plan.times_s == (0, 0.1, 0.3, 0.35, 0.4, 0.8)
    assert plan.metadata == VideoMetadata(6, 6.0, WIDTH, HEIGHT, 1.0, frames_indices=[0, 1, 2, 3, 4, 5])
    assert [number_of(frame) for frame in reader.rgb(data, plan)] == [0, 1, 2, 3, 4, 5]
    assert reader.probe(data).duration_s == 1.0


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_chosen_frames_are_those_of_the_whole(reader: VideoReader, kind: str) -> None:
    data = animated(kind, duration=40)
    every = reader.rgb(data, reader.plan(data, every_frame))
    chosen = reader.rgb(data, reader.plan(data, lambda metadata: [1, 4]))
    assert np.array_equal(chosen, every[[1, 4]])


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_no_delay_is_a_tenth_of_a_second(kind: str) -> None:
    animation = Animation(animated(kind, duration=0), MAX_PIXELS)
    assert float(animation.fps) == 10


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_a_still_picture_is_a_video_of_one_frame(reader: VideoReader, kind: str) -> None:
    data = animated(kind, count=1)
    plan = reader.plan(data, every_frame)
    assert plan.shape == (1, HEIGHT, WIDTH, 3)
    assert number_of(reader.rgb(data, plan)[0]) == 0


def test_transparent_pixels_show_the_background(reader: VideoReader) -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    red = Image.new("RGBA", (8, 8), (255, 0, 0, 255))
    file = io.BytesIO()
    clear.save(file, "WEBP", save_all=True, append_images=[red], lossless=True, duration=100)
    data = memoryview(file.getvalue())
    frames = reader.rgb(data, reader.plan(data, every_frame))
    assert frames[:, 4, 4].tolist() == [[255, 255, 255], [255, 0, 0]]


def test_a_cut_gif_gives_its_whole_frames_or_a_refusal(reader: VideoReader) -> None:
    data = animated("GIF", duration=100)
    for size in range(1, len(data), 7):
        try:
            plan = reader.plan(data[:size], every_frame)
            frames = reader.rgb(data[:size], plan)
        except ItemError:
            continue
        assert plan.metadata.total_num_frames >= 4
        assert [number_of(frame) for frame in frames] == list(range(len(frames)))


def test_a_cut_webp_is_refused(reader: VideoReader) -> None:
    data = animated("WEBP", duration=100)
    for size in range(12, len(data) - 2, 11):
        with pytest.raises(ItemError):
            reader.rgb(data[:size], reader.plan(data[:size], every_frame))


def test_an_animation_is_known_by_its_first_bytes() -> None:
    assert is_animation(animated("GIF"))
    assert is_animation(animated("WEBP"))
    assert not is_animation(memoryview(b"RIFF\0\0\0\0WAVE"))
    assert not is_animation(memoryview(b""))


def test_a_frame_that_is_too_large_is_refused() -> None:
    with pytest.raises(ItemError) as error:
        Animation(animated("GIF"), max_pixels=100)
    assert error.value.code is ErrorCode.TOO_MANY_PIXELS
