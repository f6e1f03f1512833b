"""--preprocess-device: the device's own arithmetic, run here on the CPU, against the host's.

On the CPU both give the same bits; what a CUDA device may differ by is stated in media/pixels.py and measured
by tests/gpu.
"""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save

from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.registry import load_on
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import worker_config
from tests.gpu_workers.reference import encode, picture, picture_item, plan_of, png, several
from tests.gpu_workers.video_files import encode as video_file

ON_DEVICE = "pixels are resized and normalised on cpu"


def loaded(checkpoint: Path, where: Literal["auto", "cpu", "device"], dtype: str = "auto") -> Family:
    config = worker_config(checkpoint=str(checkpoint), tower="auto", dtype=dtype, preprocess_device=where)
    return load_on(config, torch.device("cpu"))


def items() -> list[MediaItem]:
    return [
        picture_item(png(picture(150, 100))),
        picture_item(png(picture(1, 60))),
        several("image", [picture(224, 336), picture(60, 150)]),
    ]


def films() -> list[MediaItem]:
    return [
        MediaItem("video", (video_file(range(1, 14), fps=4, size=(80, 48)),)),
        several("video", [picture(90, 130)] * 5),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "internvl"])
def test_the_device_gives_the_rows_of_the_host(
    name: str, dtype: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    host = loaded(tiny_checkpoints[name], "cpu", dtype)
    device = loaded(tiny_checkpoints[name], "device", dtype)
    for batch in (items(), films()):
        assert all(map(torch.equal, encode(device, *batch), encode(host, *batch)))


def test_processed_items_share_a_forward_with_what_the_device_made(tiny_checkpoints: TinyCheckpoints) -> None:
    family = loaded(tiny_checkpoints["qwen2_vl"], "device")
    raw = picture_item(png(picture(150, 100)))
    features = family.preprocess(raw, plan_of(family, raw)).features
    tensors = {name: tensor for name, tensor in features.items() if isinstance(tensor, torch.Tensor)}
    processed = MediaItem("image", (memoryview(save(tensors)),), "processed")
    first, second = encode(family, raw, processed)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("where", "times"), [("auto", 0), ("cpu", 0), ("device", 2)])
def test_a_cpu_is_no_device_unless_it_is_asked_for(
    where: Literal["auto", "cpu", "device"],
    times: int,
    tiny_checkpoints: TinyCheckpoints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pictures and the videos each say where they are made."""
    with caplog.at_level("INFO"):
        loaded(tiny_checkpoints["qwen2_vl"], where)
    assert [record.message for record in caplog.records].count(ON_DEVICE) == times
