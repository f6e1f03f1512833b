"""app.routes.health: probes and what they say."""

from __future__ import annotations

import base64
import io
import struct
import wave

from app.routes.health import PROBE_SIDE_PIXELS, probe_picture, probe_sound
from tests.e2e.daemon import Daemon


def test_probes_of_a_daemon_that_serves(stub_daemon: Daemon) -> None:
    assert stub_daemon.http.get("/livez").status == 200
    for path in ("/readyz", "/health"):
        body = stub_daemon.http.get(path).json
        assert body["status"] == "ready"
        assert [worker["state"] for worker in body["workers"]] == ["ready"]
    assert stub_daemon.http.get("/readyz?verbose").body.startswith(b"[+]worker0 ready")


def test_health_generate_encodes_and_leaves_nothing(stub_daemon: Daemon) -> None:
    before = stub_daemon.http.server_info()
    assert stub_daemon.http.get("/health_generate").status == 200
    after = stub_daemon.http.server_info()
    assert after["engine"]["completions"]["ready"] == before["engine"]["completions"]["ready"] + 1
    assert after["admission"]["admitted"] == before["admission"]["admitted"]
    assert after["engine"]["leases"]["unattached"] == before["engine"]["leases"]["unattached"]


def test_the_probe_picture_is_a_whole_png() -> None:
    png = base64.b64decode(probe_picture(), validate=True)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (PROBE_SIDE_PIXELS, PROBE_SIDE_PIXELS)
    assert png.endswith(b"IEND\xaeB`\x82")


def test_what_is_not_there_is_a_problem_too(stub_daemon: Daemon) -> None:
    stub_daemon.http.get("/nothing").check_problem(404)
    problem = stub_daemon.http.request("DELETE", "/livez")
    problem.check_problem(405)
    assert "GET" in problem.headers["allow"]


def test_the_probe_sound_is_ten_milliseconds_of_wav() -> None:
    with wave.open(io.BytesIO(base64.b64decode(probe_sound(), validate=True))) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (16_000, 160)
