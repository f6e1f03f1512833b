"""Pictures, videos and sound of one Omni checkpoint over HTTP, with options, frame lists and tensors."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm.client import connect
from tests.e2e.client import Answer
from tests.e2e.conftest import SMALL_MEMORY
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.gpu_workers.reference import noise, picture, png, wav
from tests.gpu_workers.video_files import encode as video_file

OPTIONS = ("--mm-process-config", '{"vision_config": {"video": {"max_frames": 8}}}')


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    checkpoint = tmp_path_factory.mktemp("omni") / "qwen2_5_omni"
    command = [sys.executable, "-m", "gpu_workers.checkpoints", "qwen2_5_omni", str(checkpoint)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    with Daemon(str(checkpoint), *SMALL_MEMORY, *OPTIONS, workers=1) as daemon:
        daemon.wait_ready()
        yield daemon


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


def test_media_of_another_kind_is_refused(omni: Daemon) -> None:
    encode(omni, "AUDIO", text(png(picture(8, 8)))).check_problem(422)
    encode(omni, "VIDEO", text(wav(noise(1000)))).check_problem(422)
    encode(omni, "IMAGE", {"url": text(png(picture(8, 8))), "max_pixels": 0}).check_problem(400)
