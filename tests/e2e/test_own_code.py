"""Models whose code comes with the checkpoint, and Kimi's ways to name media, over HTTP."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm.client import connect
from tests.e2e.client import Answer
from tests.e2e.conftest import SMALL_MEMORY, make_checkpoints
from tests.e2e.daemon import REPOSITORY, Daemon, free_port
from tests.gpu_workers.reference import noise, picture, png, wav
from tests.gpu_workers.video_files import encode as video_file

TRUST = "--trust-remote-code"
BAD_CONFIGURATION = 78


@pytest.fixture(scope="module")
def own_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("own")
    make_checkpoints(directory, "mimo_v2", "kimi_vl", "kimi_k25")
    return {path.name: path for path in directory.iterdir()}


@pytest.fixture(scope="module")
def mimo(own_checkpoints: dict[str, Path]) -> Iterator[Daemon]:
    """Two workers, which copy the checkpoint's code at the same time."""
    with Daemon(str(own_checkpoints["mimo_v2"]), *SMALL_MEMORY, TRUST, workers=2) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture(scope="module")
def kimi(own_checkpoints: dict[str, Path]) -> Iterator[Daemon]:
    with Daemon(str(own_checkpoints["kimi_k25"]), *SMALL_MEMORY, workers=1) as daemon:
        daemon.wait_ready()
        yield daemon


def text(data: memoryview | bytes) -> str:
    return base64.b64encode(data).decode()


def encode(daemon: Daemon, modality: str, *items: Any) -> Answer:
    body = {"req_id": f"{modality}-{np.random.default_rng().integers(1 << 62)}", "modality": modality}
    answer: Answer = daemon.http.post_json("/encode", body | {"mm_items": list(items)})
    return answer


def rows(daemon: Daemon, answer: Answer) -> list[np.ndarray]:
    """Of each item."""
    with connect(daemon.attach_socket) as session, session.attach(answer.handle) as view:
        table = view.numpy()
        return [
            table[item.row_start : item.row_start + item.row_count].copy() for item in view.metadata.items
        ]


def test_mimos_videos_carry_their_sound_behind_their_frames(mimo: Daemon) -> None:
    silent = text(video_file(range(40)))
    heard = text(video_file(range(40), sound=noise(50_000)[None]))
    answer = encode(mimo, "VIDEO", silent, heard)
    first, second = answer.json["items"]
    segments = second["aux"]["video_audio_segment_lens"]
    assert answer.json["video_audio_segment_lens_flat"] == segments
    assert answer.json["video_audio_per_video_num_units"] == [0, len(segments)]
    assert answer.json["video_audio_feature_lens"] == [second["aux"]["video_audio_feature_length"]]
    assert len(segments) == second["grid_thw"][0][0]
    assert second["row_count"] == first["row_count"] + sum(segments)
    assert "video_audio_segment_lens" not in first["aux"]
    without, with_sound = rows(mimo, answer)
    assert np.allclose(with_sound[: first["row_count"]], without, atol=1e-5)  # the same pictures
    assert np.isfinite(with_sound).all()
    alone = encode(mimo, "VIDEO", silent).json
    assert "video_audio_per_video_num_units" not in alone


def test_mimo_takes_pictures_and_sound(mimo: Daemon) -> None:
    still = encode(mimo, "IMAGE", text(png(picture(60, 100))), {"images": [text(png(picture(28, 28)))] * 2})
    assert still.json["grid_thw"] == [[1, 4, 8], [1, 2, 2], [1, 2, 2]]
    assert [len(table) for table in rows(mimo, still)] == [8, 2]
    sound = encode(mimo, "AUDIO", text(wav(noise(16_000))), text(wav(noise(40_000)))).json
    assert sound["audio_feature_lens_raw"] == [25, 63]
    assert [item["row_count"] for item in sound["items"]] == [25, 63]


def test_what_mimo_does_not_take_is_a_4xx(mimo: Daemon) -> None:
    encode(mimo, "VIDEO", text(wav(noise(1000)))).check_problem(422)
    encode(mimo, "VIDEO", [text(png(picture(28, 28)))] * 2).check_problem(400)
    encode(mimo, "IMAGE", {"url": text(png(picture(28, 28))), "max_pixels": 100}).check_problem(400)
    encode(mimo, "IMAGE", {"video_chunk": [text(png(picture(28, 28)))]}).check_problem(400)
    encode(mimo, "AUDIO", text(png(picture(28, 28)))).check_problem(422)


@pytest.mark.parametrize("options", [(), (TRUST,)])
def test_kimi_vl_is_served_with_and_without_its_own_code(
    own_checkpoints: dict[str, Path], options: tuple[str, ...]
) -> None:
    with Daemon(str(own_checkpoints["kimi_vl"]), *SMALL_MEMORY, *options, workers=1) as daemon:
        daemon.wait_ready()
        images = {"type": "image", "image": [text(png(picture(56, 84))), text(png(picture(30, 50)))]}
        answer = encode(daemon, "IMAGE", text(png(picture(56, 84))), images)
        assert answer.json["grid_thw"] == [[4, 6], [4, 6], [4, 4]]
        assert [item["row_count"] for item in answer.json["items"]] == [6, 10]
        one, two = rows(daemon, answer)
        assert np.allclose(one, two[:6], atol=1e-5)
        encode(daemon, "VIDEO", text(video_file(range(8)))).check_problem(422)
        encode(
            daemon, "IMAGE", {"type": "video_chunk", "video_chunk": [text(png(picture(28, 28)))]}
        ).check_problem(400)


def test_without_the_flag_the_start_ends_with_one_clear_error(
    own_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "app", "serve", str(own_checkpoints["mimo_v2"]), "--port", str(free_port()),
        "--attach-socket", str(tmp_path / "attach.sock"), *SMALL_MEMORY,
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == BAD_CONFIGURATION, ended.stderr
    assert "needs --trust-remote-code" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_kimis_pictures_and_chunks_share_a_request(kimi: Daemon) -> None:
    frames = [text(png(picture(56, 84))) for _ in range(4)]
    answer = encode(
        kimi,
        "IMAGE",
        {"type": "image", "image": frames[0]},
        {"type": "video_chunk", "video_chunk": frames},
        {"type": "image", "image": [frames[0], text(png(picture(28, 56)))]},
    )
    assert [item["grid_thw"] for item in answer.json["items"]] == [
        [[1, 4, 6]],
        [[4, 4, 6]],
        [[1, 4, 6], [1, 2, 4]],
    ]
    still, chunk, several = rows(kimi, answer)
    assert [len(still), len(chunk), len(several)] == [6, 6, 8]
    assert np.allclose(still, several[:6], atol=1e-5)
    [as_video] = rows(kimi, encode(kimi, "VIDEO", {"type": "video_chunk", "video_chunk": frames}))
    assert np.array_equal(chunk, as_video)


def test_a_malformed_chunk_is_refused_by_name(kimi: Daemon) -> None:
    for item in (
        {"type": "video_chunk", "url": "data:,x"},
        {"type": "video_chunk", "video_chunk": "data:,x"},
    ):
        problem = encode(kimi, "IMAGE", item).check_problem(400)
        assert "video_chunk" in problem["message"]
    mixed = [text(png(picture(56, 84))), text(png(picture(28, 56)))]
    encode(kimi, "IMAGE", {"type": "video_chunk", "video_chunk": mixed}).check_problem(422)
