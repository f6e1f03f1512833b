"""MiMo-V2's stand-in, whose model class brings preprocess_mm_for_encoder and encode_video_audio."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
import transformers

from gpu_workers.errors import ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.encoder_hook import vision_config
from gpu_workers.families.hook_media import sampling_rate
from gpu_workers.families.registry import load_on
from gpu_workers.media.audio import AudioReader
from shm.errors import ErrorCode
from shm.messages import MediaOptions
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import worker_config
from tests.gpu_workers.reference import encode, noise, picture, picture_item, plan_of, png, several, wav
from tests.gpu_workers.video_files import encode as video_file

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

FEATURES = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}


def load(checkpoint: Path, **options: dict[str, Any]) -> Family:
    config = worker_config(
        checkpoint=str(checkpoint),
        tower="auto",
        trust_remote_code=True,
        media_options=MediaOptions(**options),
    )
    return load_on(config, torch.device("cpu"))


class WholeMiMo:
    """The whole model, driven by its own methods on what is decoded already."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)

    def outputs(self, modality: str, *media: Any) -> dict[str, Any]:
        config = vision_config(MediaOptions())
        outputs: dict[str, Any] = self.model.preprocess_mm_for_encoder(list(media), modality, config)
        return outputs

    def rows(self, modality: str, *media: Any) -> torch.Tensor:
        outputs = self.outputs(modality, *media)
        item = SimpleNamespace(**outputs, feature=outputs[FEATURES[modality]])
        with torch.inference_mode():
            rows: torch.Tensor = getattr(self.model, f"get_{modality}_feature")([item])
        return rows

    def sound_of_videos(self, *files: bytes) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self.model.encode_video_audio(self.outputs("video", *files))
        return rows


@pytest.fixture(scope="module")
def mimo(tiny_checkpoints: TinyCheckpoints) -> Family:
    return load(tiny_checkpoints["mimo_v2"])


@pytest.fixture(scope="module")
def whole(tiny_checkpoints: TinyCheckpoints) -> WholeMiMo:
    return WholeMiMo(tiny_checkpoints["mimo_v2"])


def film(frames: int, *, samples: int = 0, size: tuple[int, int] = (80, 48)) -> MediaItem:
    sound = noise(samples)[None] if samples else None
    return MediaItem("video", (video_file(range(frames), sound=sound, size=size),))


def at_24_khz(file: memoryview) -> Any:
    return AudioReader(60).samples(file, 24_000)


@pytest.mark.parametrize(("height", "width"), [(60, 100), (28, 28), (200, 301)])
def test_a_picture_equals_the_whole_models_own_methods(
    mimo: Family, whole: WholeMiMo, height: int, width: int
) -> None:
    image = picture(height, width)
    item = picture_item(png(image))
    grids = whole.outputs("image", image)["image_grid_thw"].tolist()
    assert plan_of(mimo, item).grids == grids
    assert torch.equal(encode(mimo, item)[0], whole.rows("image", image))


def test_several_pictures_of_one_item_equal_the_models_own_call(mimo: Family, whole: WholeMiMo) -> None:
    images = [picture(60, 100), picture(56, 28)]
    assert torch.equal(encode(mimo, several("image", images))[0], whole.rows("image", *images))


@pytest.mark.parametrize("frames", [1, 13, 40])
def test_a_silent_video_is_its_frames(mimo: Family, whole: WholeMiMo, frames: int) -> None:
    item = film(frames)
    outputs = whole.outputs("video", bytes(item.data))
    plan = plan_of(mimo, item)
    assert plan.grids == outputs["video_grid_thw"].tolist()
    assert plan.aux.video_timestamps == outputs["video_timestamps"]
    assert plan.aux.video_audio_segment_lens is None
    assert torch.equal(encode(mimo, item)[0], whole.rows("video", bytes(item.data)))


def test_the_sound_of_a_video_follows_its_frames(mimo: Family, whole: WholeMiMo) -> None:
    item = film(40, samples=50_000)
    outputs = whole.outputs("video", bytes(item.data))
    plan = plan_of(mimo, item)
    assert plan.aux.video_audio_segment_lens == outputs["video_audio_segment_lens_flat"]
    assert plan.aux.video_audio_feature_length == outputs["video_audio_feature_lens"].item()
    frames, sound = whole.rows("video", bytes(item.data)), whole.sound_of_videos(bytes(item.data))
    assert len(sound) == sum(plan.aux.video_audio_segment_lens) > 0
    assert torch.equal(encode(mimo, item)[0], torch.cat([frames, sound]))


def test_sound_is_heard_at_24_khz(mimo: Family, whole: WholeMiMo) -> None:
    file = wav(noise(40_000))
    item = MediaItem("audio", (file,))
    samples = at_24_khz(file)
    assert len(samples) == 60_000
    plan = plan_of(mimo, item)
    assert plan.grids == [[63]]  # 25 rows a second, the last one filled with silence
    assert plan.aux.audio_feature_length == 63
    assert torch.equal(encode(mimo, item)[0], whole.rows("audio", samples))


def test_items_of_different_sizes_get_their_own_rows(mimo: Family, whole: WholeMiMo) -> None:
    """Eight of each modality in one forward, videos with and without sound among each other."""
    sides = [28, 30, 56, 60, 84, 100, 112, 150]
    images = [picture(side, 200 - side) for side in sides]
    films = [film(frames, samples=3000 * (frames % 3)) for frames in (1, 5, 9, 13, 20, 27, 40, 41)]
    sounds = [wav(noise(1000 + 7000 * step)) for step in range(8)]
    together = {
        "image": encode(mimo, *(picture_item(png(image)) for image in images)),
        "video": encode(mimo, *films),
        "audio": encode(mimo, *(MediaItem("audio", (file,)) for file in sounds)),
    }
    for rows, image in zip(together["image"], images, strict=True):
        assert torch.allclose(rows, whole.rows("image", image), atol=1e-5)
    for rows, item in zip(together["video"], films, strict=True):
        data = bytes(item.data)
        expected = [whole.rows("video", data)]
        if "video_audio_features" in whole.outputs("video", data):
            expected.append(whole.sound_of_videos(data))
        assert torch.allclose(rows, torch.cat(expected), atol=1e-5)
    for rows, file in zip(together["audio"], sounds, strict=True):
        assert torch.allclose(rows, whole.rows("audio", at_24_khz(file)), atol=1e-5)


def test_options_of_the_daemon_reach_the_hook(tiny_checkpoints: TinyCheckpoints) -> None:
    family = load(tiny_checkpoints["mimo_v2"], image={"max_pixels": 28 * 56}, video={"max_frames": 2})
    assert plan_of(family, picture_item(png(picture(200, 400)))).rows == 2
    assert plan_of(family, film(40)).grids[0][0] == 1


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (MediaItem("video", (memoryview(b"no video at all"),)), ErrorCode.NOT_A_VIDEO),
        (MediaItem("video", (wav(noise(1000)),)), ErrorCode.NO_VIDEO_STREAM),
        (several("video", [picture(56, 56)] * 2), ErrorCode.KIND_UNSUPPORTED),
        (MediaItem("video", (memoryview(b""),), options={"fps": 3}), ErrorCode.BAD_OPTION),
        (picture_item(memoryview(b"no picture")), ErrorCode.NOT_AN_IMAGE),
        (picture_item(png(picture(28, 28)), min_pixels=9), ErrorCode.BAD_OPTION),
        (MediaItem("audio", (memoryview(b"no sound"),)), ErrorCode.NOT_AUDIO),
    ],
)
def test_bad_items_are_refused_by_cause(mimo: Family, item: MediaItem, code: ErrorCode) -> None:
    with pytest.raises(ItemError) as refused:
        plan_of(mimo, item)
    assert refused.value.code is code


def test_a_video_that_the_models_own_decoder_refuses_is_an_items_error(mimo: Family) -> None:
    """Our reader knows animated WebP, the hook's FFmpeg does not."""
    file = io.BytesIO()
    picture(56, 56).save(file, "WEBP", save_all=True, append_images=[picture(56, 57).resize((56, 56))])
    with pytest.raises(ItemError) as refused:
        plan_of(mimo, MediaItem("video", (memoryview(file.getvalue()),)))
    assert refused.value.code is ErrorCode.DECODE_FAILED


def test_the_rate_is_the_one_that_is_told_or_written_or_known() -> None:
    def described(**sections: Any) -> Any:
        return SimpleNamespace(**{"model_type": "mimo_v2"} | sections)

    assert sampling_rate(described(), {}) == 24_000
    assert sampling_rate(described(audio_config={"sample_rate": 48_000}), {}) == 48_000
    assert sampling_rate(described(audio_config=SimpleNamespace(sampling_rate=8_000)), {}) == 8_000
    both = described(processor_config={"audio_sampling_rate": 32_000}, audio_config={"sampling_rate": 48_000})
    assert sampling_rate(both, {}) == 32_000
    assert sampling_rate(both, {"sampling_rate": 22_050}) == 22_050
    assert sampling_rate(described(model_type="other"), {}) == 16_000


def test_the_samples_of_a_flac_count_too(mimo: Family) -> None:
    file = io.BytesIO()
    soundfile.write(file, noise(16_000), 16_000, format="FLAC")
    assert plan_of(mimo, MediaItem("audio", (memoryview(file.getvalue()),))).rows == 25
