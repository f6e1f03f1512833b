"""Pictures, videos and sound of one Omni checkpoint over HTTP, with options, frame lists and tensors."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from shm.client import connect
from tests.e2e.client import Answer
from tests.e2e.daemon import Daemon
from tests.gpu_workers.reference import noise, picture, png, processed_sound, wav
from tests.gpu_workers.video_files import encode as video_file


def text(data: memoryview | bytes) -> str:
    return base64.b64encode(data).decode()


def encode(daemon: Daemon, modality: str, *items: Any) -> Answer:
    body = {"req_id": f"{modality}-{np.random.default_rng().integers(1 << 62)}", "modality": modality}
    answer: Answer = daemon.http.post_json("/encode", body | {"mm_items": list(items)})
    return answer


def rows(daemon: Daemon, answer: Answer) -> np.ndarray:
    with connect(daemon.attach_socket) as session, session.attach(answer.handle) as view:
        return view.numpy().copy()


def test_every_modality_is_answered_with_its_grid_and_aux(omni: Daemon) -> None:
    clip = text(video_file(range(40)))
    video = encode(omni, "VIDEO", clip).json
    assert video["grid_thw"][0][0] == 4  # eight frames at most, by --mm-process-config
    assert video["second_per_grid_ts"] == [1.0]
    assert video["items"][0]["aux"] == {"second_per_grid_ts": 1.0}
    sound = encode(omni, "AUDIO", text(wav(noise(48_000))), text(wav(noise(20_800)))).json
    assert sound["audio_feature_lens_raw"] == [300, 130]
    assert [item["row_count"] for item in sound["items"]] == [75, 32]
    still = encode(omni, "IMAGE", text(png(picture(56, 84)))).json
    assert still["grid_thw"] == [[1, 4, 6]]
    assert "aux" not in still["items"][0]
    assert "video_timestamps" not in still


def test_an_items_own_options_change_its_size_alone(omni: Daemon) -> None:
    clip = text(video_file(range(40)))
    answer = encode(omni, "VIDEO", clip, {"url": clip, "fps": 1})
    assert [item["grid_thw"][0][0] for item in answer.json["items"]] == [4, 2]


def test_a_list_of_frames_gives_one_items_rows(omni: Daemon) -> None:
    frames = [text(png(picture(48, 80))) for _ in range(3)]
    bare, named = encode(omni, "VIDEO", frames), encode(omni, "VIDEO", {"frames": frames})
    assert len(bare.json["items"]) == 1
    assert bare.json["grid_thw"][0][0] == 2
    assert np.array_equal(rows(omni, bare), rows(omni, named))


def test_processed_arrays_are_checked_and_encoded(omni: Daemon) -> None:
    values = np.zeros((16, 1176), "<f4")
    grid = np.array([[1, 4, 4]], "<i8")
    arrays = {
        "pixel_values": {"dtype": "F32", "shape": [16, 1176], "data": text(values.tobytes())},
        "image_grid_thw": {"dtype": "I64", "shape": [1, 3], "data": text(grid.tobytes())},
    }
    answer = encode(omni, "IMAGE", {"processed": arrays})
    assert answer.json["rows"] == 4
    assert np.isfinite(rows(omni, answer)).all()
    wrong = {**arrays, "image_grid_thw": {**arrays["image_grid_thw"], "data": text(bytes(24))}}
    encode(omni, "IMAGE", {"processed": wrong}).check_problem(400)


def test_processed_sound_has_the_rows_of_the_raw_one(omni: Daemon, omni_checkpoint: Path) -> None:
    tensors = processed_sound(omni_checkpoint, "qwen2_5_omni", 20_800)
    file = text(save(tensors))
    mask = tensors["feature_attention_mask"]
    arrays = {
        "input_features": array("F32", tensors["input_features"].numpy().astype("<f4")),
        "feature_attention_mask": array("BOOL", mask.numpy().astype(bool)),
    }
    raw = rows(omni, encode(omni, "AUDIO", text(wav(noise(20_800)))))
    for item in ({"processed": file}, {"processed": arrays}, arrays):
        answer = encode(omni, "AUDIO", item)
        assert answer.json["audio_feature_lens_raw"] == [130]
        assert np.array_equal(rows(omni, answer), raw)


def test_a_processed_tensor_that_does_not_fit_is_named_with_its_limit(
    omni: Daemon, omni_checkpoint: Path
) -> None:
    tensors = processed_sound(omni_checkpoint, "qwen2_5_omni", 20_800)
    tensors["input_features"] = tensors["input_features"][:, :80].contiguous()
    refused = encode(omni, "AUDIO", {"processed": text(save(tensors))})
    refused.check_problem(400)
    assert refused.json["message"] == (
        "mm_items[0] has input_features of size 80 on axis 1; the model takes 128"
    )


def test_pixels_are_made_where_the_daemon_is_told(omni: Daemon) -> None:
    assert "pixels are resized and normalised on cpu" in omni.log()


def array(dtype: str, values: np.ndarray) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(values.shape), "data": text(values.tobytes())}


def test_a_modality_that_the_checkpoint_lacks_is_named(qwen: Daemon) -> None:
    refused = encode(qwen, "AUDIO", text(wav(noise(1000))))
    refused.check_problem(422)
    assert "modality audio is not served by this checkpoint" in refused.json["message"]


def test_media_of_another_kind_is_refused(omni: Daemon) -> None:
    encode(omni, "AUDIO", text(png(picture(8, 8)))).check_problem(422)
    encode(omni, "VIDEO", text(wav(noise(1000)))).check_problem(422)
    encode(omni, "IMAGE", {"url": text(png(picture(8, 8))), "max_pixels": 0}).check_problem(400)
