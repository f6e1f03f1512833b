"""The video reader: exact sampling, threads, damage, limits, lists of pictures."""

import io
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from gpu_workers.errors import ItemError
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import Choose, VideoLimits, VideoMetadata, VideoPlan
from shm.errors import ErrorCode
from tests.gpu_workers.video_files import HEIGHT, WIDTH, encode, number_of, numbered

FRAMES = 100
GROUPS = {"x264-params": "keyint=12:min-keyint=12:scenecut=0:bframes=3"}
OPEN_GROUPS = {"x264-params": GROUPS["x264-params"] + ":open-gop=1"}
REFRESH = {"x264-params": "keyint=12:intra-refresh=1:bframes=0"}
HEVC_OPEN_GROUPS = {"x265-params": "keyint=12:min-keyint=12:bframes=3:open-gop=1:log-level=none"}
# Name -> arguments of encode. One of each way in which packets, frames and keyframes can relate.
FILES = {
    "h264 mp4": {"options": GROUPS},
    "h264 mp4 open groups": {"options": OPEN_GROUPS},
    "h264 mp4 intra refresh": {"options": REFRESH},
    "h264 mkv open groups": {"options": OPEN_GROUPS, "container": "matroska"},
    "h264 ts": {"options": GROUPS, "container": "mpegts"},
    "h264 ts intra refresh": {"options": REFRESH, "container": "mpegts"},
    "h264 avi": {"options": GROUPS, "container": "avi"},
    "h264 flv": {"options": GROUPS, "container": "flv"},
    "hevc mp4 open groups": {"codec": "libx265", "options": HEVC_OPEN_GROUPS},
    "hevc ts open groups": {"codec": "libx265", "options": HEVC_OPEN_GROUPS, "container": "mpegts"},
    "vp9 webm": {"codec": "libvpx-vp9", "container": "webm", "options": {"g": "12", "lag-in-frames": "10"}},
    "vp8 webm": {"codec": "libvpx", "container": "webm", "options": {"g": "12", "auto-alt-ref": "1"}},
    "mpeg4 avi": {"codec": "mpeg4", "container": "avi", "options": {"g": "12", "bf": "2"}},
    "mpeg4 mp4": {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg2 ts": {"codec": "mpeg2video", "container": "mpegts", "options": {"g": "12", "bf": "2"}},
    "mjpeg mp4": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
}


def choice(indices: Sequence[int]) -> Choose:
    return lambda metadata: indices


def every_frame(metadata: VideoMetadata) -> range:
    return range(metadata.total_num_frames)


def make_reader(**limits: int) -> VideoReader:
    return VideoReader(
        VideoLimits(**{"max_pixels": 1_000_000, **limits}), background="white", decode_threads=2
    )


def refusal(reader: VideoReader, data: memoryview, choose: Choose = every_frame) -> ItemError:
    with pytest.raises(ItemError) as error:
        reader.rgb(data, reader.plan(data, choose))
    return error.value


def png(number: int, width: int = WIDTH) -> memoryview:
    file = io.BytesIO()
    Image.fromarray(numbered(number, width)).save(file, "PNG")
    return memoryview(file.getvalue())


@pytest.mark.parametrize("name", FILES)
def test_any_choice_of_frames_is_exactly_those_of_a_whole_decode(name: str) -> None:
    data, reader = encode(range(FRAMES), **FILES[name]), make_reader()
    plan = reader.plan(data, every_frame)
    every = reader.rgb(data, plan)
    assert [number_of(frame) for frame in every] == list(range(FRAMES))
    assert plan.times_s == pytest.approx([index / 10 for index in range(FRAMES)], abs=1e-3)
    choices = [sorted(random.Random(seed).sample(range(FRAMES), 5)) for seed in range(3)]
    for indices in [*choices, [0], [FRAMES - 1], [0, 57, 58, 59, 60, 61, 99]]:
        chosen = reader.plan(data, choice(indices))
        assert np.array_equal(reader.rgb(data, chosen), every[indices])
        assert chosen.times_s == tuple(plan.times_s[index] for index in indices)


def test_groups_without_a_chosen_frame_are_not_decoded() -> None:
    data, reader = encode(range(FRAMES), options=GROUPS), make_reader()
    table = reader.plan(data, choice([0, 50])).table
    assert table is not None
    assert sum(table.packets_for([0])) == 1
    assert sum(table.packets_for([0, 50])) < 15
    assert sum(table.packets_for(range(FRAMES))) == FRAMES


def test_a_frame_may_be_chosen_twice() -> None:
    data, reader = encode(range(10)), make_reader()
    frames = reader.rgb(data, reader.plan(data, choice([3, 7, 7])))
    assert [number_of(frame) for frame in frames] == [3, 7, 7]


def test_frames_come_one_by_one_to_those_who_ask() -> None:
    data, reader = encode(range(30)), make_reader()
    plan = reader.plan(data, choice([4, 9, 20]))
    assert [(place, number_of(pixels)) for place, pixels in reader.each(data, plan)] == [
        (0, 4),
        (1, 9),
        (2, 20),
    ]


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_upright(degrees: int) -> None:
    data, reader = encode(range(5), rotation=degrees), make_reader()
    plan = reader.plan(data, every_frame)
    frames, stored = reader.rgb(data, plan), reader.rgb(*unturned(reader, range(5)))
    assert plan.shape == ((5, WIDTH, HEIGHT, 3) if degrees % 180 else (5, HEIGHT, WIDTH, 3))
    assert np.array_equal(frames, np.rot90(stored, degrees // 90, axes=(1, 2)))
    assert (reader.probe(data).width, reader.probe(data).height) == plan.shape[2:0:-1]


def test_many_threads_share_a_reader() -> None:
    data, reader = encode(range(40), options=GROUPS), make_reader()

    def numbers(seed: int) -> bool:
        indices = sorted(random.Random(seed).sample(range(40), 6))
        frames = reader.rgb(data, reader.plan(data, choice(indices)))
        return [number_of(frame) for frame in frames] == indices

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(numbers, range(24)))


def test_several_threads_give_the_same_frames() -> None:
    data = encode(range(90), size=(640, 480), options=GROUPS)
    one = VideoReader(VideoLimits(1_000_000), background="white", decode_threads=1)
    four = VideoReader(VideoLimits(1_000_000), background="white", decode_threads=4)
    plan = one.plan(data, every_frame)
    assert np.array_equal(one.rgb(data, plan), four.rgb(data, plan))


def test_the_rule_sees_what_hugging_faces_samplers_read() -> None:
    seen: list[VideoMetadata] = []

    def choose(metadata: VideoMetadata) -> list[int]:
        seen.append(metadata)
        return [0]

    plan = make_reader().plan(encode(range(20), fps=8), choose)
    assert seen == [VideoMetadata(20, 8.0, WIDTH, HEIGHT, 2.5)]
    assert plan.metadata.frames_indices == [0]


def test_a_lone_frame_is_chosen_unasked() -> None:
    def never(metadata: VideoMetadata) -> list[int]:
        raise AssertionError("there is nothing to choose")

    data, reader = encode([5]), make_reader()
    assert number_of(reader.rgb(data, reader.plan(data, never))[0]) == 5


@pytest.mark.parametrize("cause", [ValueError, ZeroDivisionError])
def test_a_rule_that_cannot_be_met_is_the_videos_fault(cause: type[Exception]) -> None:
    def choose(metadata: VideoMetadata) -> list[int]:
        raise cause

    assert refusal(make_reader(), encode(range(3)), choose).code is ErrorCode.TOO_FEW_FRAMES


@pytest.mark.parametrize("indices", [[3, 2], [-1], [10]])
def test_a_rule_that_chooses_nonsense_is_our_fault(indices: list[int]) -> None:
    assert refusal(make_reader(), encode(range(10)), choice(indices)).code is ErrorCode.INTERNAL


def test_what_is_over_a_limit_is_refused_with_both_numbers() -> None:
    data = encode(range(40))
    too_large = refusal(make_reader(max_pixels=100), data)
    assert (too_large.code, too_large.value, too_large.limit) == (ErrorCode.TOO_MANY_PIXELS, 80 * 48, 100)
    too_many = refusal(make_reader(max_frames=30), data)
    assert (too_many.code, too_many.value, too_many.limit) == (ErrorCode.TOO_MANY_FRAMES, 40, 30)
    too_long = refusal(make_reader(max_seconds=3), data)
    assert (too_long.code, too_long.value, too_long.limit) == (ErrorCode.TOO_LONG, 4, 3)
    too_much = refusal(make_reader(max_total_pixels=10_000), data)
    assert (too_much.code, too_much.value) == (ErrorCode.TOO_MANY_PIXELS, 40 * 80 * 48)


@pytest.mark.parametrize("name", ["h264 ts", "h264 mkv open groups", "vp8 webm", "mpeg4 avi", "h264 mp4"])
def test_a_cut_file_gives_its_whole_frames_or_a_refusal(name: str) -> None:
    data, reader = fast_start(encode(range(60), **FILES[name])), make_reader()
    served = 0
    for sixteenth in range(1, 16):
        cut = data[: len(data) * sixteenth // 16]
        try:
            plan = reader.plan(cut, every_frame)
            frames = reader.rgb(cut, plan)
        except ItemError:
            continue
        served += 1
        assert len(frames) == plan.metadata.total_num_frames
        # The last ones may have lost those between them; each is still shown at its own time.
        shown = [number_of(frame) for frame in frames[:-1]]
        assert shown[:-4] == list(range(len(shown[:-4])))
        assert shown == [round(seconds * 10) for seconds in plan.times_s[:-1]]
    assert served >= 3


def test_a_damaged_file_with_too_few_frames_is_refused() -> None:
    data = fast_start(encode(range(60), options=GROUPS))
    cut = data[: len(data) * 13 // 16]
    kept = make_reader(min_frames=1).plan(cut, every_frame).metadata.total_num_frames
    assert 1 <= kept < 60
    too_few = refusal(make_reader(min_frames=kept + 1), cut)
    assert (too_few.code, too_few.value, too_few.limit) == (ErrorCode.TOO_FEW_FRAMES, kept, kept + 1)


@pytest.mark.parametrize("name", ["h264 mp4", "vp9 webm", "mpeg4 avi", "h264 ts"])
def test_flipped_bits_end_in_frames_as_planned_or_a_refusal(name: str) -> None:
    data, reader = encode(range(30), **FILES[name]), make_reader()
    for seed in range(40):
        source = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(8):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        try:
            plan = reader.plan(memoryview(damaged), every_frame)
            assert reader.rgb(memoryview(damaged), plan).shape == plan.shape
        except ItemError:
            continue


def test_listed_pictures_are_shown_at_the_clients_rate() -> None:
    reader, pictures = make_reader(), [png(number) for number in range(6)]
    plan = reader.plan_pictures(pictures, choice([1, 4]), fps=2)
    assert plan.times_s == (0.5, 2.0)
    assert (plan.metadata.fps, plan.metadata.duration) == (2.0, 3.0)
    assert [number_of(frame) for frame in reader.rgb_of_pictures(pictures, plan)] == [1, 4]


def test_listed_pictures_of_different_sizes_are_no_video() -> None:
    with pytest.raises(ItemError) as error:
        make_reader().plan_pictures([png(0), png(1, width=40)], every_frame)
    assert error.value.code is ErrorCode.FRAME_SIZES_DIFFER


def unturned(reader: VideoReader, numbers: Sequence[int]) -> tuple[memoryview, VideoPlan]:
    data = encode(numbers)
    return data, reader.plan(data, every_frame)


def fast_start(data: memoryview) -> memoryview:
    """The same file; an MP4 gets its index in front, so that it survives a cut."""
    with av.open(io.BytesIO(data)) as source, tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        if not source.format.name.startswith("mov"):
            return data
        with av.open(file.name, "w", options={"movflags": "faststart"}) as target:
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)
        return memoryview(Path(file.name).read_bytes())
