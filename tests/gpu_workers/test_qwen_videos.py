"""Videos of the Qwen families against Hugging Face's processors and get_video_features.

The reference decodes every frame, lets Hugging Face's own processor sample and resize them, and runs the
whole model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.video_utils import VideoMetadata

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits
from shm.errors import ErrorCode
from shm.layout import CompletionKind
from tests.gpu_workers.conftest import VISION_FAMILIES, TinyCheckpoints
from tests.gpu_workers.harness import Harness
from tests.gpu_workers.reference import (
    assert_as_close,
    encode,
    load_family,
    picture,
    plan_of,
    png,
    rows_of_vision,
    several,
    whole_model,
)
from tests.gpu_workers.video_files import encode as video_file
from tests.gpu_workers.video_files import numbered

SAMPLED = {"fps": 2.0}
READER = VideoReader(VideoLimits(max_pixels=1 << 24), "white", 1)


def video(frames: int, fps: int = 10, size: tuple[int, int] = (80, 48)) -> memoryview:
    return video_file(range(1, frames + 1), fps=fps, size=size)


def item_of(data: memoryview, **options: Any) -> MediaItem:
    return MediaItem("video", (data,), options=options)


class Reference:
    """The whole Hugging Face model and its video processor, which samples with the daemon's defaults."""

    def __init__(self, checkpoint: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = whole_model(checkpoint, family, dtype)
        self.processor = transformers.AutoVideoProcessor.from_pretrained(
            checkpoint, cap_pixels_per_frame=False
        )

    def inputs(self, data: memoryview, **options: Any) -> Any:
        """Of all frames, decoded in order."""
        everything = READER.plan(data, lambda metadata: range(metadata.total_num_frames))
        frames = torch.from_numpy(READER.rgb(data, everything)).permute(0, 3, 1, 2)
        metadata = everything.metadata
        return self.processor(
            videos=[frames],
            video_metadata=[
                VideoMetadata(
                    metadata.total_num_frames,
                    metadata.fps,
                    metadata.width,
                    metadata.height,
                    metadata.duration,
                )
            ],
            do_sample_frames=True,
            input_data_format="channels_first",
            return_metadata=True,
            return_tensors="pt",
            **(SAMPLED | options),
        )

    def features(self, inputs: Any) -> torch.Tensor:
        """Rows with DeepStack levels behind them."""
        with torch.no_grad():
            return rows_of_vision(
                self.model.get_video_features(
                    pixel_values_videos=inputs["pixel_values_videos"],
                    video_grid_thw=inputs["video_grid_thw"],
                )
            )


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(checkpoint: Path, family_name: str) -> Reference:
    return Reference(checkpoint, family_name)


@pytest.mark.parametrize(("frames", "fps"), [(40, 10), (25, 10), (13, 4), (4, 30)])
def test_a_single_video_equals_hugging_face_exactly(
    family: Family, reference: Reference, frames: int, fps: int
) -> None:
    data = video(frames, fps)
    inputs = reference.inputs(data)
    item = item_of(data)
    assert family.inspect(item) is None
    plan = family.measure(item)
    assert plan.grids == inputs["video_grid_thw"].tolist()
    assert (plan.width, plan.height) == (80, 48)
    assert torch.equal(encode(family, item)[0], reference.features(inputs))


def test_what_is_told_of_time_is_hugging_faces(
    family: Family, family_name: str, reference: Reference, checkpoint: Path
) -> None:
    data = video(25, 10)
    [metadata] = reference.inputs(data)["video_metadata"]
    aux = plan_of(family, item_of(data)).aux
    if family_name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        processor = transformers.AutoProcessor.from_pretrained(checkpoint)
        indices = np.asarray(metadata.frames_indices)
        assert aux.video_timestamps == processor._calculate_timestamps(indices, metadata.fps, 2)
        assert len(aux.video_timestamps) == (len(indices) + 1) // 2
        assert aux.second_per_grid_ts is None
    elif family_name == "qwen2_5_vl":
        assert aux.second_per_grid_ts == 2 / metadata.sampled_fps
    elif family_name == "qwen2_vl":
        assert aux.second_per_grid_ts is None
    else:
        assert aux.second_per_grid_ts == 2 / SAMPLED["fps"]


def test_a_mixed_batch_gives_each_video_its_own_rows(
    family: Family, reference: Reference, checkpoint: Path, family_name: str
) -> None:
    truth = Reference(checkpoint, family_name, torch.float64)
    files = [video(4 + 7 * number, 10, (64 + 16 * number, 48)) for number in range(8)]
    for rows, data in zip(encode(family, *map(item_of, files)), files, strict=True):
        inputs = reference.inputs(data)
        assert_as_close(rows, reference.features(inputs), truth.features(inputs))


def test_videos_of_one_and_of_three_frames_are_taken(family: Family) -> None:
    for frames in (1, 3):
        plan = plan_of(family, item_of(video(frames)))
        assert plan.grids[0][0] in ((frames + 1) // 2, 1)
        assert encode(family, item_of(video(frames)))[0].isfinite().all()


def test_a_list_of_frames_is_a_video_of_all_of_them(family: Family, reference: Reference) -> None:
    images = [Image.fromarray(numbered(number)) for number in (5, 6, 7)]
    item = several("video", images)
    frames = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    inputs = reference.processor(
        videos=[frames], do_sample_frames=False, input_data_format="channels_first", return_tensors="pt"
    )
    assert plan_of(family, item).grids == inputs["video_grid_thw"].tolist()
    assert torch.equal(encode(family, item)[0], reference.features(inputs))


def test_frames_of_different_sizes_are_refused(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, several("video", [picture(48, 80), picture(48, 81)]))
    assert refusal.value.code is ErrorCode.FRAME_SIZES_DIFFER


def test_an_items_own_rate_and_limits_are_the_processors(family: Family, reference: Reference) -> None:
    data = video(40)
    item = item_of(data, fps=4, max_pixels=200_000, min_pixels=3136)
    size = {"shortest_edge": 3136, "longest_edge": 200_000}
    assert torch.equal(encode(family, item)[0], reference.features(reference.inputs(data, fps=4, size=size)))
    chosen = item_of(data, num_frames=6)
    assert plan_of(family, chosen).grids[0][0] == 3


def test_the_daemons_limits_of_frames_hold(checkpoint: Path) -> None:
    family = load_family(checkpoint, video={"fps": 10, "max_frames": 8, "min_frames": 2})
    assert plan_of(family, item_of(video(40))).grids[0][0] == 4


def test_what_is_no_video_is_refused(family: Family) -> None:
    with pytest.raises(ItemError) as refusal:
        plan_of(family, item_of(memoryview(b"no video at all")))
    assert refusal.value.code is ErrorCode.NOT_A_VIDEO


def test_a_worker_process_encodes_videos_beside_pictures(tiny_checkpoints: TinyCheckpoints) -> None:
    checkpoint = tiny_checkpoints["qwen3_vl"]
    data = video(25)
    with Harness(tower="auto", checkpoint=str(checkpoint)) as worker:
        ticket = worker.submit(bytes(data), bytes(video(8)), modality="video")
        still = worker.outcome(bytes(png(picture(64, 64)))).end
        end = worker.outcome_of(ticket).end
        damaged = worker.outcome(bytes(data), b"no video", modality="video").end
        assert end.kind is still.kind is CompletionKind.READY
        rows, metadata = torch.from_numpy(worker.rows(end)), worker.metadata(end)
    reference = Reference(checkpoint, "qwen3_vl")
    inputs = reference.inputs(data)
    count = metadata.items[0].row_count
    assert torch.allclose(rows[:count], reference.features(inputs), rtol=1e-4, atol=1e-6)
    assert metadata.items[0].grids == inputs["video_grid_thw"].tolist()
    assert (
        metadata.items[0].aux.video_timestamps
        == plan_of(load_family(checkpoint), item_of(data)).aux.video_timestamps
    )
    assert (damaged.error, damaged.error_item) == (ErrorCode.NOT_A_VIDEO, 1)
