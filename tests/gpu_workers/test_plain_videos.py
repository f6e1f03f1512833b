"""Videos of the families without code of their own against Hugging Face's processors and methods.

The reference decodes every frame, lets Hugging Face's own processor sample and resize them, and runs the
whole model.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits
from shm.errors import ErrorCode
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import encode, load_family, picture, plan_of, several, whole_model
from tests.gpu_workers.video_files import encode as video_file

GRIDS: Final = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "kimi_k25")
FAMILIES: Final = ("llava_onevision", "internvl", *GRIDS)
READER: Final = VideoReader(VideoLimits(max_pixels=1 << 24), "white", 1)


def video(frames: int, fps: int = 10, size: tuple[int, int] = (80, 48)) -> memoryview:
    return video_file(range(1, frames + 1), fps=fps, size=size)


def item_of(data: memoryview, **options: Any) -> MediaItem:
    return MediaItem("video", (data,), options=options)


class Reference:
    """The whole Hugging Face model and its video processor."""

    def __init__(self, checkpoint: Path, family: str) -> None:
        self.model = whole_model(checkpoint, family)
        self.processor = transformers.AutoVideoProcessor.from_pretrained(checkpoint)

    def inputs(self, data: memoryview) -> Any:
        """Of all frames, decoded in order; two a second where the processor does not say otherwise."""
        everything = READER.plan(data, lambda metadata: range(metadata.total_num_frames))
        known = everything.metadata
        metadata = VideoMetadata(known.total_num_frames, known.fps, known.width, known.height, known.duration)
        return self.processor(
            videos=[torch.from_numpy(READER.rgb(data, everything)).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            do_sample_frames=True,
            fps=self.processor.fps or 2.0,
            input_data_format="channels_first",
            return_metadata=True,
            return_tensors="pt",
        )

    def features(self, inputs: Any) -> torch.Tensor:
        """(rows, dim)."""
        pixels = inputs["pixel_values_videos"]
        with torch.no_grad():
            if "video_grid_thw" in inputs:
                output = self.model.get_video_features(pixels, inputs["video_grid_thw"])
            elif hasattr(self.model, "get_video_features"):
                output = self.model.get_video_features(pixel_values_videos=pixels)
            else:
                output = self.model.get_image_features(pixel_values=pixels.flatten(0, 1))
        return torch.cat(list(output.pooler_output))


@pytest.fixture(scope="module", params=FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(checkpoint: Path, family_name: str) -> Reference:
    return Reference(checkpoint, family_name)


@pytest.mark.parametrize(("frames", "fps"), [(40, 10), (25, 10), (13, 4)])
def test_a_single_video_equals_hugging_face_exactly(
    family: Family, reference: Reference, frames: int, fps: int
) -> None:
    data = video(frames, fps)
    inputs = reference.inputs(data)
    item = item_of(data)
    assert family.inspect(item) is None
    plan = family.measure(item)
    assert plan.grids == grids_of(inputs)
    assert (plan.width, plan.height) == (80, 48)
    assert torch.equal(encode(family, item)[0], reference.features(inputs))


def grids_of(inputs: Any) -> list[list[int]]:
    if "video_grid_thw" in inputs:
        grids: list[list[int]] = inputs["video_grid_thw"].tolist()
        return grids
    return [[1, 4, 4]] * inputs["pixel_values_videos"].shape[1]


@pytest.mark.parametrize("frames", [40, 25])
def test_what_is_told_of_time_is_what_hugging_face_writes_into_the_prompt(
    family: Family, family_name: str, reference: Reference, frames: int
) -> None:
    data = video(frames)
    aux = plan_of(family, item_of(data)).aux
    if family_name not in GRIDS:
        assert aux.video_timestamps is None
        return
    [metadata] = reference.inputs(data)["video_metadata"]
    step = reference.processor.temporal_patch_size
    expected = (np.asarray(metadata.frames_indices) / metadata.fps)[::step]
    np.testing.assert_allclose(aux.video_timestamps, expected)


def test_videos_of_different_lengths_and_sizes_keep_their_rows(family: Family) -> None:
    items = [
        item_of(video(frames, size=size))
        for frames, size in [(40, (80, 48)), (25, (48, 80)), (40, (64, 64)), (13, (80, 80))]
    ]
    alone = [encode(family, item)[0] for item in items]
    for rows, single in zip(encode(family, *items), alone, strict=True):
        torch.testing.assert_close(rows, single, rtol=1e-5, atol=2e-6)


def test_a_list_of_pictures_is_a_video_whose_frames_are_all_taken(
    family: Family, reference: Reference
) -> None:
    images = [picture(48, 80) for _ in range(6)]
    item = several("video", images)
    assert family.inspect(item) is not None
    inputs = reference.processor(videos=[images], do_sample_frames=False, return_tensors="pt")
    assert plan_of(family, item).grids == grids_of(inputs)
    assert torch.equal(encode(family, item)[0], reference.features(inputs))


def test_a_video_of_one_frame_is_taken(family: Family) -> None:
    [rows] = encode(family, item_of(video(1)))
    assert torch.isfinite(rows).all()


def test_the_rate_of_an_item_is_its_own(tiny_checkpoints: TinyCheckpoints) -> None:
    family = load_family(tiny_checkpoints["llava_onevision"])
    slow, fast = (plan_of(family, item_of(video(40), fps=fps)) for fps in (1, 5))
    assert (len(slow.grids), len(fast.grids)) == (4, 20)


def test_a_video_too_short_for_the_rate_shows_one_frame(tiny_checkpoints: TinyCheckpoints) -> None:
    """InternVL's own rule divides by the number of frames that it takes, which is none."""
    family = load_family(tiny_checkpoints["internvl"])
    assert len(family.measure(item_of(video(3))).grids) == 1
    assert torch.isfinite(encode(family, item_of(video(3)))[0]).all()


def test_a_video_of_fewer_frames_than_the_processor_wants_shows_them_all(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    family = load_family(tiny_checkpoints["internvl"], video={"num_frames": 8})
    assert len(plan_of(family, item_of(video(6))).grids) == 6
    assert len(plan_of(family, item_of(video(40))).grids) == 8


def test_a_checkpoint_without_video_processor_serves_pictures(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    family = load_family(tiny_checkpoints["gemma3"])
    assert family.info().modalities == ("image",)
    with pytest.raises(ItemError) as refusal:
        family.inspect(item_of(video(3)))
    assert refusal.value.code is ErrorCode.MODALITY_UNSUPPORTED
