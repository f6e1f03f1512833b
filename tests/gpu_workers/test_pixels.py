"""pixel_values bit for bit as Hugging Face's processors (torchvision backend) make them."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from gpu_workers.errors import ConfigurationError
from gpu_workers.media.image import ImageReader
from gpu_workers.media.pixels import Frames, HostPixels, Pixels, TorchPixels, open_pixels

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

CPU = torch.device("cpu")

# What the published checkpoints' preprocessor_config.json say.
RELEASED: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"min_pixels": 3136, "max_pixels": 12_845_056},
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 12_845_056},
    "qwen3_vl": {
        "patch_size": 16,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
# (height, width)
SIZES = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 199),
    (199, 1),
    (3, 50),
    (15, 17),
    (28, 28),
    (56, 56),
    (224, 224),
    (256, 256),  # no resize for Qwen3-VL
    (333, 777),
    (336, 448),  # no resize for Qwen2-VL
    (480, 640),
    (1080, 1920),
    (1999, 10),
    (2160, 3840),
]
JPEG_VARIANTS: dict[str, dict[str, Any]] = {
    "baseline 4:2:0": {"subsampling": "4:2:0"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4", "quality": 98},
    "progressive": {"progressive": True},
    "optimised": {"optimize": True, "quality": 20},
    "restart markers": {"restart_marker_rows": 1},
}


def noise(*shape: int) -> Frames:
    random = np.random.default_rng(shape)
    return random.integers(0, 256, (*shape, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=RELEASED)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each family, as a checkpoint's directory gives it."""
    return loaded(tmp_path_factory.mktemp("processor"), **RELEASED[request.param])


def loaded(directory: Path, **options: Any) -> Any:
    transformers.Qwen2VLImageProcessor(**options).save_pretrained(directory)
    return AutoImageProcessor.from_pretrained(directory, backend="torchvision")


def expected(processor: Any, picture: Frames) -> tuple[torch.Tensor, int, int]:
    """The processor's pixel_values of (height, width, 3), and the size that it gave the picture."""
    channels_first = torch.from_numpy(picture.copy()).permute(2, 0, 1)
    features = processor(images=[channels_first], input_data_format="channels_first", return_tensors="pt")
    _, grid_high, grid_wide = features["image_grid_thw"][0].tolist()
    return features["pixel_values"], grid_high * processor.patch_size, grid_wide * processor.patch_size


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pictures_of_all_sizes_become_the_processors_values(processor: Any, size: tuple[int, int]) -> None:
    picture = noise(*size)
    values, height, width = expected(processor, picture)
    pixels = open_pixels(processor, dtype=torch.float32, device=CPU)
    assert same(pixels.pixel_values(picture[None], height, width), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_values_are_the_processors_values_rounded_once(processor: Any, dtype: torch.dtype) -> None:
    picture = noise(333, 777)
    values, height, width = expected(processor, picture)
    pixels = open_pixels(processor, dtype=dtype, device=CPU)
    assert same(pixels.pixel_values(picture[None], height, width), values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (1, 199), (256, 256), (480, 640)], ids=str)
def test_a_torch_device_gives_the_same_values(
    processor: Any, size: tuple[int, int], dtype: torch.dtype
) -> None:
    picture = noise(*size)
    values, height, width = expected(processor, picture)
    pixels = TorchPixels(processor, dtype, CPU)
    assert same(pixels.pixel_values(picture[None], height, width), values.to(dtype))


@pytest.mark.parametrize("size", [(1, 1), (17, 33), (479, 641)], ids=str)
@pytest.mark.parametrize("variant", JPEG_VARIANTS)
def test_jpegs_become_the_values_of_what_pillow_decodes(
    processor: Any, variant: str, size: tuple[int, int]
) -> None:
    file = io.BytesIO()
    Image.fromarray(noise(*size)).save(file, "JPEG", **JPEG_VARIANTS[variant])
    assert_jpeg_becomes_the_processors_values(processor, file.getvalue())


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpegs_without_rgb_become_the_values_of_what_pillow_converts(processor: Any, mode: str) -> None:
    file = io.BytesIO()
    Image.fromarray(noise(60, 90)).convert(mode).save(file, "JPEG")
    assert_jpeg_becomes_the_processors_values(processor, file.getvalue())


def test_a_turned_jpeg_becomes_the_values_of_the_upright_picture(processor: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(noise(60, 90)).save(file, "JPEG", exif=exif)
    assert_jpeg_becomes_the_processors_values(processor, file.getvalue())


def assert_jpeg_becomes_the_processors_values(processor: Any, data: bytes) -> None:
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    values, height, width = expected(processor, np.array(upright.convert("RGB")))
    rgb = ImageReader(33_500_000, "white").rgb(memoryview(data))
    pixels = open_pixels(processor, dtype=torch.float32, device=CPU)
    assert same(pixels.pixel_values(rgb[None], height, width), values)


@pytest.mark.parametrize("options", RELEASED.values(), ids=RELEASED)
@pytest.mark.parametrize("change", [{"do_rescale": False}, {"do_normalize": False}, {"resample": 2}], ids=str)
def test_the_processors_own_settings_count(
    options: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    processor = loaded(tmp_path, **options, **change)
    picture = noise(50, 70)
    values, height, width = expected(processor, picture)
    for pixels in (HostPixels(processor, torch.float32), TorchPixels(processor, torch.float32, CPU)):
        assert same(pixels.pixel_values(picture[None], height, width), values)


@pytest.mark.parametrize("sizes", [{"patch_size": 8}, {"temporal_patch_size": 1}, {"merge_size": 1}], ids=str)
def test_other_patch_sizes_are_cut_as_well(sizes: dict[str, int], tmp_path: Path) -> None:
    processor = loaded(tmp_path, **sizes)
    picture = noise(50, 70)
    values, height, width = expected(processor, picture)
    for pixels in (HostPixels(processor, torch.float32), TorchPixels(processor, torch.float32, CPU)):
        assert same(pixels.pixel_values(picture[None], height, width), values)


@pytest.mark.parametrize(
    "change", [{"do_resize": False}, {"do_rescale": False, "do_normalize": False}], ids=str
)
def test_a_processor_that_leaves_pixels_alone_is_refused(change: dict[str, bool], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        open_pixels(loaded(tmp_path, **change), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("make", [transformers.Qwen2VLVideoProcessor, transformers.Qwen3VLVideoProcessor])
@pytest.mark.parametrize("frame_count", [2, 5, 8])
def test_frames_of_a_video_become_the_video_processors_values(
    make: Callable[[], Any], frame_count: int
) -> None:
    processor = make()
    frames = noise(frame_count, 240, 320)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    features = processor(
        videos=[video], do_sample_frames=False, input_data_format="channels_first", return_tensors="pt"
    )
    _, grid_high, grid_wide = features["video_grid_thw"][0].tolist()
    height, width = grid_high * processor.patch_size, grid_wide * processor.patch_size
    for pixels in (HostPixels(processor, torch.float32), TorchPixels(processor, torch.float32, CPU)):
        assert same(pixels.pixel_values(frames, height, width), features["pixel_values_videos"])


@pytest.mark.parametrize("make", [transformers.Qwen2VLVideoProcessor, transformers.Qwen3VLVideoProcessor])
def test_frames_that_come_one_by_one_become_the_same_values(make: Callable[[], Any]) -> None:
    processor = make()
    frames = noise(5, 240, 320)
    for pixels in (HostPixels(processor, torch.float32), TorchPixels(processor, torch.float32, CPU)):
        expected_values = pixels.pixel_values(frames, 224, 448)
        backwards = reversed(list(enumerate(frames)))
        assert same(pixels.pixel_values_of(backwards, 5, 224, 448), expected_values)


def test_where_pixels_are_made_is_as_told(tmp_path: Path) -> None:
    processor = loaded(tmp_path)
    made = {
        where: type(open_pixels(processor, dtype=torch.float32, device=CPU, where=where))
        for where in ("auto", "cpu", "device")
    }
    assert made == {"auto": HostPixels, "cpu": HostPixels, "device": TorchPixels}
    elsewhere = open_pixels(processor, dtype=torch.float32, device=torch.device("meta"))
    assert isinstance(elsewhere, TorchPixels)


def test_threads_that_share_a_processor_do_not_disturb_each_other(processor: Any) -> None:
    pixels: Pixels = open_pixels(processor, dtype=torch.float32, device=CPU)
    pictures = [noise(40 + 50 * index, 300) for index in range(8)]
    values = [expected(processor, picture) for picture in pictures]

    def equal(index: int) -> bool:
        theirs, height, width = values[index % 8]
        return same(pixels.pixel_values(pictures[index % 8][None], height, width), theirs)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(equal, range(32)))


def test_values_outlive_everything_they_were_made_of(tmp_path: Path) -> None:
    processor = loaded(tmp_path)
    values, height, width = expected(processor, noise(1300, 1300))
    row = HostPixels(processor, torch.float32).pixel_values(noise(1300, 1300)[None], height, width)[-1]
    assert torch.equal(row, values[-1])
