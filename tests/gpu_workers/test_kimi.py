"""Kimi K2.5's requests for pictures with chunks of videos among them."""

from pathlib import Path

import pytest
import torch
import transformers

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from shm.errors import ErrorCode
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.reference import (
    encode,
    load_family,
    picture,
    picture_item,
    plan_of,
    png,
    several,
    whole_model,
)

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints["kimi_k25"]


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(checkpoint)


def chunk(count: int, height: int = 56, width: int = 84) -> MediaItem:
    files = several(
        "image", [picture(height + place, width).resize((width, height)) for place in range(count)]
    )
    return MediaItem("image", files.files, "chunk")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_chunk_equals_hugging_faces_video_of_its_frames(
    family: Family, checkpoint: Path, count: int
) -> None:
    frames = [picture(56 + place, 84).resize((84, 56)) for place in range(count)]
    processor = transformers.AutoVideoProcessor.from_pretrained(checkpoint)
    inputs = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    arguments = {name: inputs[name] for name in ("pixel_values_videos", "video_grid_thw")}
    with torch.no_grad():
        features = whole_model(checkpoint, "kimi_k25").get_video_features(**arguments)
    plan = plan_of(family, chunk(count))
    assert plan.grids == inputs["video_grid_thw"].tolist()
    assert plan.rows == sum((height // 2) * (width // 2) for _, height, width in plan.grids)
    assert torch.equal(encode(family, chunk(count))[0], torch.cat(list(features.pooler_output)))


def test_pictures_and_chunks_of_one_request_get_their_own_rows(family: Family) -> None:
    items = [
        picture_item(png(picture(60, 90))),
        chunk(4),
        several("image", [picture(28, 56), picture(90, 60)]),
        chunk(2, 112, 56),
    ]
    for rows, item in zip(encode(family, *items), items, strict=True):
        assert torch.allclose(rows, encode(family, item)[0], atol=1e-5)


def test_a_chunk_never_shares_a_forward_with_pictures(family: Family) -> None:
    """Both belong to a request for pictures, whose modality would be the key if they had none."""
    keys = {
        family.preprocess(item, plan_of(family, item)).batch_key
        for item in (chunk(2), picture_item(png(picture(60, 90))))
    }
    assert len(keys) == 2
    assert "" not in keys


def test_frames_of_different_sizes_are_no_chunk(family: Family) -> None:
    files = several("image", [picture(28, 56), picture(90, 60)]).files
    with pytest.raises(ItemError) as refused:
        family.inspect(MediaItem("image", files, "chunk"))
    assert refused.value.code is ErrorCode.FRAME_SIZES_DIFFER


def test_other_families_take_no_chunks(tiny_checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(ItemError) as refused:
        load_family(tiny_checkpoints["qwen2_vl"]).inspect(chunk(2))
    assert refused.value.code is ErrorCode.KIND_UNSUPPORTED
