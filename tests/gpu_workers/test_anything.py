"""Models that nobody registered: PaliGemma and SmolVLM, as transformers has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpu_workers.checkpoints.recipe import byte_tokenizer
from gpu_workers.errors import ConfigurationError
from gpu_workers.families import anything
from gpu_workers.families.base import Family, MediaItem
from gpu_workers.families.stub import StubFamily
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.harness import worker_config
from tests.gpu_workers.reference import encode, load_family, picture, picture_item, plan_of, png, several
from tests.gpu_workers.video_files import encode as video_file

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
LANGUAGE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def paligemma(directory: Path) -> Any:
    """One size for all pictures."""
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **LANGUAGE},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        projection_dim=64,
        image_token_index=300,
    )
    transformers.SiglipImageProcessor(size={"height": 56, "width": 56}).save_pretrained(directory)
    return transformers.PaliGemmaForConditionalGeneration(config)


def smolvlm(directory: Path) -> Any:
    """Tiles, as many as the picture wants."""
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **LANGUAGE},
        vision_config={"model_type": "smolvlm_vision", **TOWER},
        scale_factor=2,
        image_token_id=300,
    )
    processor = transformers.SmolVLMImageProcessor(
        size={"longest_edge": 168}, max_image_size={"longest_edge": 56}, resample=3
    )
    processor.save_pretrained(directory)
    return transformers.SmolVLMForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[paligemma, smolvlm], ids=["paligemma", "smolvlm"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Any] = request.param
    directory = tmp_path_factory.mktemp(make.__name__)
    torch.manual_seed(5)
    make(directory).save_pretrained(directory)
    byte_tokenizer(["<image>"]).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(checkpoint)


def features(checkpoint: Path, height: int, width: int) -> torch.Tensor:
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="torchvision")
    inputs = processor(images=[picture(height, width)], return_tensors="pt")
    with torch.no_grad():
        output = model.get_image_features(**inputs)
    return torch.cat(list(output.pooler_output))


@pytest.mark.parametrize(("height", "width"), [(56, 56), (150, 100), (60, 150)])
def test_a_picture_of_an_unregistered_model_equals_hugging_face(
    family: Family, checkpoint: Path, height: int, width: int
) -> None:
    [rows] = encode(family, picture_item(png(picture(height, width))))
    assert torch.equal(rows, features(checkpoint, height, width))


def test_shapes_that_the_tower_has_met_are_known_from_the_header(family: Family) -> None:
    item = picture_item(png(picture(90, 130)))
    measured = family.inspect(item) or family.measure(item)
    again = family.inspect(picture_item(png(picture(90, 130))))
    assert again is not None
    assert (again.rows, again.grids) == (measured.rows, measured.grids)


def test_items_of_different_sizes_get_exactly_their_rows(family: Family) -> None:
    items = [picture_item(png(picture(*size))) for size in [(56, 56), (150, 100), (60, 150)]]
    alone = [encode(family, item)[0] for item in items]
    assert all(map(torch.equal, encode(family, *items), alone))


def test_several_pictures_of_one_item_are_all_encoded(family: Family) -> None:
    images = [picture(56, 56), picture(60, 150)]
    rows = [plan_of(family, picture_item(png(image))).rows for image in images]
    assert len(encode(family, several("image", images))[0]) == sum(rows)


def test_only_the_towers_are_loaded(family: Family, checkpoint: Path) -> None:
    whole = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert family.info().tower_bytes < whole / 2 + 100_000


def test_a_processor_that_lacks_an_argument_is_named_at_start(tmp_path: Path) -> None:
    """LLaVA-NeXT wants image_sizes, and SigLIP's processor gives none."""
    config = transformers.LlavaNextVideoConfig(
        text_config={"model_type": "llama", **LANGUAGE},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        image_grid_pinpoints=[[56, 56]],
        image_token_index=300,
        video_token_index=301,
    )
    transformers.LlavaNextVideoForConditionalGeneration(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 56, "width": 56}).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"needs image_sizes, and SiglipImageProcessor gives pixel"):
        load_family(tmp_path)


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    with pytest.raises(ConfigurationError, match="'nobody_knows' is not supported"):
        load_family(tmp_path)


def test_code_in_the_checkpoint_is_not_run_unasked(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    described = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="trust-remote-code"):
        load_family(tmp_path)
    assert not ran.exists()


def test_an_installed_package_may_bring_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "brought-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[encoderd.families]\nbrought_vl = brought:load\n")
    (tmp_path / "brought.py").write_text(
        "from gpu_workers.families.stub import StubFamily\n"
        "def load(config, device, model_type):\n"
        "    assert model_type == 'brought_vl'\n"
        "    return StubFamily()\n"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brought_vl"}))
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(load_family(tmp_path), StubFamily)


def test_a_model_without_pictures_is_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE)).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="neither get_image_features nor get_video_features"):
        load_family(tmp_path)


@pytest.mark.parametrize("name", ["glm4v", "kimi_k25"])
def test_trying_finds_what_the_rules_of_a_registered_family_say(
    name: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    config = worker_config(checkpoint=str(tiny_checkpoints[name]), tower="auto")
    tried, ruled = anything.load(config, torch.device("cpu"), name), load_family(tiny_checkpoints[name])
    assert tried.info() == ruled.info()
    film = MediaItem("video", (video_file(range(13), fps=4),))
    for item in (picture_item(png(picture(150, 100))), film):
        expected = plan_of(ruled, item)
        assert plan_of(tried, item).grids == expected.grids
        assert torch.equal(encode(tried, item)[0], encode(ruled, item)[0])
