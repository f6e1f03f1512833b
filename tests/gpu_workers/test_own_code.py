"""Checkpoints whose model is their own code, of which the stand-ins of make-checkpoint are two."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from PIL import Image

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.own_code import LOCK_NAME, alone_in
from gpu_workers.families.registry import load_on
from shm.errors import ErrorCode
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import worker_config
from tests.gpu_workers.reference import encode, picture, picture_item, plan_of, png, several

# The reader silences Pillow once; pytest puts the filters back after the test that made the reader.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

LANGUAGE: Final = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES: Final = [(224, 336), (150, 100), (30, 50), (60, 300), (56, 56), (28, 28), (100, 150), (57, 57)]

# A model with a language model of an unusual name, and pictures the Hugging Face way.
OWN_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own_vl"
    width: int = 16

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.eyes = nn.Linear(588, config.width)
        self.babble = nn.ModuleDict({
            "words": nn.Embedding(1000, config.width),
            "layers": nn.Linear(config.width, 1000),
        })
        self.post_init()

    def get_input_embeddings(self):
        return self.babble["words"]

    def preprocess_mm_for_encoder(self, mm_data, modality, config):
        if modality != "image":
            raise NotImplementedError(f"no {modality.name}")
        assert set(config) == {"image", "video", "audio"}
        values, grids = [], []
        for one in mm_data:
            if one.width == 13:
                raise ArithmeticError("unlucky")
            small = one.resize((14 * (1 + one.width % 3), 14))
            pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).float() / 255
            values.append(pixels.reshape(14, -1, 14, 3).permute(1, 0, 2, 3).reshape(-1, 588))
            grids.append([1, 1, len(values[-1])])
        return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}

    def get_image_features(self, pixel_values, image_grid_thw):
        return self.eyes(pixel_values)

    def get_video_features(self, pixel_values_videos):
        return self.eyes(pixel_values_videos)
"""

# A model without hooks, for a processor that transformers has.
PLAIN_MODEL = """
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class PlainConfig(PreTrainedConfig):
    model_type = "plain_vl"

class PlainModel(PreTrainedModel):
    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        self.eyes = nn.Conv2d(3, 8, kernel_size=14, stride=14)
        self.post_init()

    def get_image_features(self, pixel_values):
        return self.eyes(pixel_values).flatten(2).transpose(1, 2)
"""


def load(checkpoint: Path, **changes: Any) -> Family:
    config = worker_config(checkpoint=str(checkpoint), tower="auto", **{"trust_remote_code": True} | changes)
    return load_on(config, torch.device("cpu"))


class WholeKimi:
    """The whole model and its processor, both by the checkpoint's code."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=True)

    def inputs(self, image: Image.Image) -> Any:
        return self.processor(images=[image], return_tensors="pt")

    def rows(self, image: Image.Image) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self.model._extract_image_features(**self.inputs(image))
        return rows


@pytest.fixture(scope="module")
def kimi(tiny_checkpoints: TinyCheckpoints) -> Family:
    return load(tiny_checkpoints["kimi_vl"])


@pytest.fixture(scope="module")
def whole(tiny_checkpoints: TinyCheckpoints) -> WholeKimi:
    return WholeKimi(tiny_checkpoints["kimi_vl"])


def write_checkpoint(directory: Path, code: str, model_type: str, name: str) -> Path:
    """Weights, and the code beside them; name: as the classes begin."""
    (directory / "own.py").write_text(code)
    auto_map = {"AutoConfig": f"own.{name}Config", "AutoModel": f"own.{name}Model"}
    described = {"model_type": model_type, "architectures": [f"{name}Model"], "auto_map": auto_map}
    (directory / "config.json").write_text(json.dumps(described))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model = transformers.AutoModel.from_config(config, trust_remote_code=True)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(described | {"dtype": "float32"}))
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("own_vl"), OWN_MODEL, "own_vl", "Own")


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_kimi_vl_picture_equals_the_checkpoints_own_model(
    kimi: Family, whole: WholeKimi, height: int, width: int
) -> None:
    image = picture(height, width)
    item = picture_item(png(image))
    [grid] = whole.inputs(image)["image_grid_hws"].tolist()
    plan = plan_of(kimi, item)
    assert plan.grids == [grid]
    assert plan.rows == (grid[0] // 2) * (grid[1] // 2)
    assert torch.equal(encode(kimi, item)[0], whole.rows(image))


def test_eight_pictures_of_different_sizes_get_their_own_rows(kimi: Family, whole: WholeKimi) -> None:
    images = [picture(*size) for size in SIZES]
    for rows, image in zip(
        encode(kimi, *(picture_item(png(image)) for image in images)), images, strict=True
    ):
        assert torch.allclose(rows, whole.rows(image), atol=1e-5)


def test_several_pictures_of_one_item_have_a_grid_each(kimi: Family, whole: WholeKimi) -> None:
    images = [picture(56, 56), picture(60, 150)]
    item = several("image", images)
    assert plan_of(kimi, item).grids == [
        grid for image in images for grid in whole.inputs(image)["image_grid_hws"].tolist()
    ]
    assert torch.allclose(
        encode(kimi, item)[0], torch.cat([whole.rows(image) for image in images]), atol=1e-5
    )


def test_a_size_that_was_measured_is_known_from_the_header(kimi: Family) -> None:
    item = picture_item(png(picture(91, 133)))
    assert kimi.inspect(item) is None
    measured = kimi.measure(item)
    again = kimi.inspect(picture_item(png(picture(91, 133))))
    assert again is not None
    assert (again.rows, again.grids) == (measured.rows, measured.grids)


def test_what_own_code_cannot_apply_is_refused(kimi: Family) -> None:
    file = png(picture(56, 56))
    for item, code in (
        (picture_item(file, max_pixels=1000), ErrorCode.BAD_OPTION),
        (MediaItem("image", (file,), "processed"), ErrorCode.KIND_UNSUPPORTED),
        (picture_item(memoryview(b"no picture")), ErrorCode.NOT_AN_IMAGE),
        (MediaItem("audio", (file,)), ErrorCode.MODALITY_UNSUPPORTED),
    ):
        with pytest.raises(ItemError) as refused:
            kimi.inspect(item)
        assert refused.value.code is code


@pytest.mark.parametrize("name", ["kimi_vl", "mimo_v2"])
def test_no_weight_of_the_language_model_is_loaded(
    name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    from gpu_workers.checkpoints import make_checkpoint

    make_checkpoint(name, tmp_path, language_layers=40)
    deep, shallow = load(tmp_path).info(), load(tiny_checkpoints[name]).info()
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert deep.tower_bytes == shallow.tower_bytes < whole / 2


def test_a_language_model_of_any_name_is_left_out(own: Path) -> None:
    towers = (588 + 1) * 16 * 4
    assert load(own).info().tower_bytes == towers


def test_a_hook_with_hugging_faces_methods_is_used(own: Path) -> None:
    family = load(own)
    assert family.info().modalities == ("image",)  # of videos the hook says that it does not take them
    model = transformers.AutoModel.from_pretrained(own, trust_remote_code=True)
    images = [picture(20, 30), picture(20, 31), picture(50, 50)]
    for rows, image in zip(
        encode(family, *(picture_item(png(image)) for image in images)), images, strict=True
    ):
        outputs = model.preprocess_mm_for_encoder(
            [image], "image", dict.fromkeys(("image", "video", "audio"))
        )
        with torch.inference_mode():
            assert torch.equal(rows, model.get_image_features(**outputs))


def test_a_model_without_hooks_is_tried_like_any_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PLAIN_MODEL, "plain_vl", "Plain")
    square = {"height": 56, "width": 56}
    transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=square).save_pretrained(tmp_path)
    family = load(tmp_path)
    image = picture(60, 90)
    model = transformers.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="torchvision")
    inputs = processor(images=[image], return_tensors="pt")
    with torch.inference_mode():
        expected = model.get_image_features(**inputs)[0]
    assert torch.equal(encode(family, picture_item(png(image)))[0], expected)


@pytest.mark.parametrize("name", ["mimo_v2", "own_vl", "idefics3"])
def test_without_the_flag_the_error_names_it_and_no_code_runs(name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    described = {"model_type": name, "auto_map": auto_map, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="needs --trust-remote-code"):
        load(tmp_path, trust_remote_code=False)
    assert not ran.exists()


def test_code_that_does_not_work_here_is_one_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise LookupError('it is Tuesday')")
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_vl", "auto_map": auto_map}))
    with pytest.raises(ConfigurationError, match=r"own\.Own does not work here: LookupError: it is Tuesday"):
        load(tmp_path)


def test_a_model_that_cannot_be_built_is_one_error_too(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own, tmp_path, dirs_exist_ok=True)
    broken = OWN_MODEL.replace("self.eyes = nn.Linear(588, config.width)", "self.eyes = config.sight")
    (tmp_path / "own.py").write_text(broken)
    with pytest.raises(ConfigurationError, match=r"own\.OwnModel does not work here: AttributeError"):
        load(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a directory should be")
    with (
        pytest.raises(
            ConfigurationError, match=r"file, which cannot be written \(File exists\): set HF_HOME"
        ),
        alone_in(tmp_path / "file"),
    ):
        pass


def test_workers_take_turns_in_the_cache(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path),
        (tmp_path / LOCK_NAME).open("w") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / LOCK_NAME).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_hook_refuses_is_an_items_error(own: Path) -> None:
    family = load(own)
    with pytest.raises(ItemError) as refused:
        plan_of(family, picture_item(png(picture(20, 13))))
    assert refused.value.code is ErrorCode.UNSUPPORTED_FORMAT


def test_a_known_type_without_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mimo_v2"}))
    with pytest.raises(ConfigurationError, match=r"auto_map .* names no model"):
        load(tmp_path)


def test_a_model_of_transformers_never_runs_the_checkpoints_code(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE)).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has neither"):
        load(tmp_path)


def test_a_registered_family_never_runs_the_checkpoints_code(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Kimi K2.5's checkpoints bring code too; transformers' classes are the reference."""
    for path in tiny_checkpoints["kimi_k25"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "processor_config.json"):
        described = json.loads((tmp_path / name).read_text())
        classes = ("AutoConfig", "AutoModel", "AutoImageProcessor", "AutoVideoProcessor")
        described["auto_map"] = dict.fromkeys(classes, "own.Own")
        (tmp_path / name).write_text(json.dumps(described))
    assert load(tmp_path).info().modalities == ("image", "video")
