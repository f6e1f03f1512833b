"""Every video of the public cases, at the loader: size, frames, times and pixels, or the right refusal; and
what Hugging Face's video processors choose from it and make of it."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

from gpu_workers.errors import ItemError
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import Choose, VideoLimits, VideoMetadata
from shm.errors import ErrorCode

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "cases"
MAX_PIXELS = 33_500_000
REFUSED_AS = {
    "vid_audio_only": ErrorCode.NO_VIDEO_STREAM,
    "vid_no_moov": ErrorCode.DECODE_FAILED,
    "vid_zero_samples": ErrorCode.DECODE_FAILED,
    "vid_zero_byte": ErrorCode.EMPTY_ITEM,
    "vid_text": ErrorCode.NOT_A_VIDEO,
    "vid_frames_list_empty": ErrorCode.EMPTY_ITEM,
    "vid_frames_list_one_bad": ErrorCode.NOT_AN_IMAGE,
}
# The recorded tool lost the frames that its decoder still held; the range is what others get.
CUT_SHORT = "vid_corrupt_tail"
# As the manifest's facts were made: Qwen2-VL's defaults, the published size limits of Qwen3-VL.
PROCESSORS: dict[str, Any] = {
    "qwen2_vl": Qwen2VLVideoProcessor(),
    "qwen3_vl": Qwen3VLVideoProcessor(
        size={"shortest_edge": 4096, "longest_edge": 25165824}, cap_pixels_per_frame=False
    ),
}


def video_cases() -> list[dict[str, Any]]:
    manifest = CASES / "public" / "manifest.json"
    if not manifest.exists():
        return []
    return [case for case in json.loads(manifest.read_text())["cases"] if case["kind"] == "video"]


def chosen(*, files: bool, rejected: bool) -> list[Any]:
    return [
        pytest.param(case, id=case["id"])
        for case in video_cases()
        if ("files" in case) == files and (case["expect"]["verdict"] == "reject") == rejected
    ]


def with_pixel_values() -> list[Any]:
    """(case, family) for which the processor's output on all frames was recorded."""
    return [
        pytest.param(case, family, id=f"{case['id']}-{family}")
        for case in (param.values[0] for param in chosen(files=True, rejected=False))
        for family in PROCESSORS
        if "grid_thw" in case["expect"]["facts"]["hf"].get(f"{family}_all_frames", {})
        and case["id"] != CUT_SHORT
    ]


def read(case: dict[str, Any]) -> memoryview:
    return memoryview((CASES / case["files"][0]).read_bytes())


def listed_pictures(case: dict[str, Any]) -> list[memoryview]:
    """Of a list of data URLs, or of one in vLLM's form, which holds several."""
    item = case["request"]["mm_items"][0]
    texts = (
        item.partition(",")[2].split(",") if isinstance(item, str) else [url.split(",")[1] for url in item]
    )
    return [memoryview(base64.b64decode(text)) for text in texts]


def every_frame(metadata: VideoMetadata) -> range:
    return range(metadata.total_num_frames)


def by_processor(family: str, fps: float) -> Choose:
    processor = PROCESSORS[family]
    return lambda metadata: processor.sample_frames(metadata=metadata, fps=fps)


def shortened(indices: list[int], facts: list[Any]) -> list[Any]:
    return [*indices[:2], "...", indices[-1]] if "..." in facts else indices


@pytest.fixture
def reader() -> VideoReader:
    return VideoReader(
        VideoLimits(max_pixels=MAX_PIXELS, max_frames=2000), background="white", decode_threads=2
    )


@pytest.mark.parametrize("case", chosen(files=True, rejected=False))
def test_a_probe_has_the_headers_facts(reader: VideoReader, case: dict[str, Any]) -> None:
    facts, probe = case["expect"]["facts"], reader.probe(read(case))
    assert [probe.width, probe.height] == facts["display_size"]
    assert probe.frames == facts["header_frames"]
    assert probe.fps == pytest.approx(facts["header_avg_fps"] or 24, abs=1e-6)
    assert probe.has_audio == (facts["audio_streams"] > 0)


@pytest.mark.parametrize("case", chosen(files=True, rejected=False))
def test_every_frame_is_found_with_its_time(reader: VideoReader, case: dict[str, Any]) -> None:
    facts, plan = case["expect"]["facts"], reader.plan(read(case), every_frame)
    first, last = facts.get("frames_range", [facts["frames_decoded"]] * 2)
    assert first <= plan.metadata.total_num_frames <= last
    assert plan.metadata.fps == pytest.approx(facts["header_avg_fps"] or 24, abs=1e-6)
    times = facts["pts_s"]
    if isinstance(times, dict):
        assert [plan.times_s[0], plan.times_s[-1]] == pytest.approx(list(times.values()), abs=1e-6)
    else:
        assert list(plan.times_s[: len(times)]) == pytest.approx(times, abs=1e-6)


@pytest.mark.parametrize("case", chosen(files=True, rejected=False))
def test_frames_are_the_recorded_pictures(reader: VideoReader, case: dict[str, Any]) -> None:
    facts, data = case["expect"]["facts"], read(case)
    plan = reader.plan(data, every_frame)
    frames = reader.rgb(data, plan)
    width, height = facts["display_size"]
    assert frames.shape == (plan.metadata.total_num_frames, height, width, 3)
    if "canonical" in facts:
        recorded = np.asarray(Image.open(CASES / facts["canonical"]).convert("RGB"))
        difference = np.abs(frames.reshape(-1, width, 3).astype(int) - recorded)
        assert difference.max() == 0


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("case", chosen(files=True, rejected=False))
def test_the_sampled_frames_are_those_of_hugging_faces_processor(
    reader: VideoReader, case: dict[str, Any], family: str
) -> None:
    facts = case["expect"]["facts"]["hf"][f"{family}_sample_frames(fps)"]
    plan = reader.plan(read(case), by_processor(family, facts["asked"]["fps"]))
    if "error" in facts:  # of a lone frame: there is nothing to choose
        assert plan.indices == [0]
        return
    if case["id"] == CUT_SHORT:
        assert max(plan.indices) < plan.metadata.total_num_frames
        return
    assert len(plan.indices) == facts["count"]
    assert shortened(plan.indices, facts["indices"]) == facts["indices"]


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("case", chosen(files=True, rejected=False))
def test_sampled_frames_are_the_ones_of_a_whole_decode(
    reader: VideoReader, case: dict[str, Any], family: str
) -> None:
    data = read(case)
    plan = reader.plan(data, by_processor(family, 2.0))
    every = reader.rgb(data, reader.plan(data, every_frame))
    assert np.array_equal(reader.rgb(data, plan), every[plan.indices])


@pytest.mark.parametrize(("case", "family"), with_pixel_values())
def test_hugging_faces_processor_makes_the_recorded_pixel_values(
    reader: VideoReader, case: dict[str, Any], family: str
) -> None:
    facts = case["expect"]["facts"]["hf"][f"{family}_all_frames"]
    data = read(case)
    plan = reader.plan(data, every_frame)
    features = PROCESSORS[family](
        [torch.from_numpy(reader.rgb(data, plan)).permute(0, 3, 1, 2)],
        do_sample_frames=False,
        video_metadata=[dataclasses.asdict(plan.metadata)],
        return_tensors="pt",
    )
    pixel_values = features["pixel_values_videos"]
    assert features["video_grid_thw"].tolist() == [facts["grid_thw"]]
    assert list(pixel_values.shape) == facts["pixel_values_shape"]
    assert pixel_values.mean().item() == pytest.approx(facts["mean"], abs=2e-3)
    assert pixel_values.std().item() == pytest.approx(facts["std"], abs=2e-3)


@pytest.mark.parametrize("case", chosen(files=False, rejected=False))
def test_listed_pictures_are_the_frames_of_one_video(reader: VideoReader, case: dict[str, Any]) -> None:
    facts, pictures = case["expect"]["facts"], listed_pictures(case)
    plan = reader.plan_pictures(pictures, every_frame)
    assert plan.indices == facts["frame_ids"]
    assert plan.metadata.fps == 24
    frames = reader.rgb_of_pictures(pictures, plan)
    assert frames.shape[:1] == (facts["frames"],)
    if "size" in facts:
        assert frames.shape == (facts["frames"], facts["size"][1], facts["size"][0], 3)


@pytest.mark.parametrize("case", chosen(files=True, rejected=True))
def test_a_rejected_video_is_refused_for_its_own_reason(reader: VideoReader, case: dict[str, Any]) -> None:
    for look in (reader.probe, lambda data: reader.plan(data, every_frame)):
        with pytest.raises(ItemError) as refusal:
            look(read(case))
        assert refusal.value.code is REFUSED_AS[case["id"]]


@pytest.mark.parametrize("case", chosen(files=False, rejected=True))
def test_a_rejected_list_is_refused_for_its_own_reason(reader: VideoReader, case: dict[str, Any]) -> None:
    pictures = listed_pictures(case)
    with pytest.raises(ItemError) as refusal:
        reader.plan_pictures(pictures, every_frame)
    assert refusal.value.code is REFUSED_AS[case["id"]]


def test_the_cases_are_there() -> None:
    if not CASES.exists():
        pytest.skip("the shared cases are not beside this checkout")
    assert len(video_cases()) > 25
