"""What bad input gets: one 4xx that names the field and the limit; everything beside it stays right."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shm.client import Session
from tests.e2e.client import Answer, data_url
from tests.e2e.daemon import Daemon
from tests.e2e.load import Load
from tests.e2e.pictures import picture_bytes
from tests.e2e.raw_session import wait_all_free

MEBIBYTE = 1 << 20
JPEG = picture_bytes(160, 120, 1, "JPEG")
PNG = picture_bytes(84, 56, 2)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large and holds one short line of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 32))
        + chunk(b"IEND", b"")
    )


@dataclass(frozen=True)
class Bad:
    """An item that must be refused: with which statuses, and what the message must name."""

    item: Callable[[], Any]
    statuses: tuple[int, ...]
    names: tuple[str, ...]


BAD_ITEMS = {
    "broken base64": Bad(lambda: "data:image/png;base64,@@@@not-base64@@@@", (400, 422), ("base64",)),
    "a data URL without a comma": Bad(lambda: "data:image/png;base64", (400,), ()),
    "not an image": Bad(lambda: data_url(b"<html>not a picture</html>" * 9), (400, 415, 422), ("image",)),
    "truncated JPEG": Bad(lambda: data_url(JPEG[: len(JPEG) * 6 // 10]), (400, 422), ("truncated",)),
    "truncated PNG": Bad(lambda: data_url(PNG[: len(PNG) // 2]), (400, 422), ("truncated",)),
    "zero bytes": Bad(lambda: "data:image/png;base64,", (400, 422), ("empty",)),
    "an item over 64 MiB": Bad(lambda: data_url(bytes(64 * MEBIBYTE + 3)), (413,), (str(64 * MEBIBYTE),)),
    "over 33.5 megapixels": Bad(lambda: data_url(png_header(5793, 5793)), (400, 413, 422), ("33554432",)),
    "aspect ratio over 200": Bad(lambda: data_url(picture_bytes(4020, 20, 3)), (400, 422), ("200",)),
    "an empty string": Bad(lambda: "", (400, 422), ("mm_items[1]",)),
    "a number": Bad(lambda: 7, (400,), ("mm_items",)),
    "null": Bad(lambda: None, (400,), ("mm_items",)),
    "a dict of nothing known": Bad(lambda: {"colour": "red"}, (400,), ("mm_items",)),
    "a local path outside the root": Bad(lambda: "/etc/hostname", (403, 404, 422), ()),
    "a scheme that is not served": Bad(lambda: "ftp://127.0.0.1/x.png", (400, 403, 422), ()),
    "a closed port": Bad(lambda: "http://127.0.0.1:9/x.png", (422, 502, 503, 504), ()),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_is_a_4xx_that_names_it_and_its_neighbours_are_unharmed(
    qwen: Daemon, qwen_session: Session, name: str
) -> None:
    """The bad item stands second in its own request; good requests are in flight at the same time."""
    bad = BAD_ITEMS[name]
    pids = qwen.worker_pids()
    alone = rows_of(qwen_session, qwen.http.encode(PNG))
    with Load(qwen.http, threads=5) as load:
        for _ in range(2):
            load.post(PNG)
        refused = qwen.http.encode([data_url(PNG), bad.item()], req_id="bad")
        for _ in range(2):
            load.post(PNG)
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            assert np.allclose(rows_of(qwen_session, outcome.answer), alone, rtol=1e-4, atol=1e-5)
    problem = refused.check_problem(*bad.statuses, req_id="bad")
    for named in bad.names:
        assert named in problem["message"], problem
    assert "mm_items" in problem["message"], problem
    assert qwen.worker_pids() == pids
    wait_all_free(qwen.attach_socket)


def rows_of(session: Session, answer: Answer) -> np.ndarray[Any, Any]:
    with session.attach(answer.handle) as view:
        return view.numpy().copy()


BAD_REQUESTS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "unknown modality": ({"req_id": "r", "mm_items": ["x"], "modality": "smell"}, (400, 422), "modality"),
    "a modality not served": (
        {"req_id": "r", "mm_items": ["x"], "modality": "audio"},
        (400, 422),
        "modality",
    ),
    "modality a number": ({"req_id": "r", "mm_items": ["x"], "modality": 1}, (400,), "modality"),
    "missing req_id": ({"mm_items": ["x"], "modality": "image"}, (400,), "req_id"),
    "empty req_id": ({"req_id": "", "mm_items": ["x"], "modality": "image"}, (400,), "req_id"),
    "req_id a number": ({"req_id": 5, "mm_items": ["x"], "modality": "image"}, (400,), "req_id"),
    "missing mm_items": ({"req_id": "r", "modality": "image"}, (400,), "mm_items"),
    "empty mm_items": ({"req_id": "r", "mm_items": [], "modality": "image"}, (400,), "mm_items"),
    "null mm_items": ({"req_id": "r", "mm_items": None, "modality": "image"}, (400,), "mm_items"),
    "num_parts zero": (
        {"req_id": "r", "mm_items": ["x"], "modality": "image", "num_parts": 0},
        (400,),
        "num_parts",
    ),
    "part_idx past num_parts": (
        {"req_id": "r", "mm_items": ["x"], "modality": "image", "num_parts": 2, "part_idx": 2},
        (400,),
        "part_idx",
    ),
    "part_idx negative": (
        {"req_id": "r", "mm_items": ["x"], "modality": "image", "part_idx": -1},
        (400,),
        "part_idx",
    ),
    "hashes of another count": (
        {"req_id": "r", "mm_items": ["x", "y"], "modality": "image", "hashes": ["h"]},
        (400,),
        "hashes",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_field_is_a_4xx_that_names_it(qwen: Daemon, name: str) -> None:
    body, statuses, field = BAD_REQUESTS[name]
    problem = qwen.http.post_json("/encode", body).check_problem(*statuses)
    assert field in problem["message"], problem


BAD_BODIES = {
    "no body": b"",
    "not JSON": b"mm_items=x",
    "an array": b"[1, 2]",
    "cut off": b'{"req_id": "r", "mm_items": ["',
    "not UTF-8": b'{"req_id": "\xff\xfe", "mm_items": ["x"], "modality": "image"}',
    "a thousand brackets": b'{"req_id": "r", "mm_items": ' + b"[" * 1000 + b"]" * 1000 + b"}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_json_object_is_400(qwen: Daemon, name: str) -> None:
    answer = qwen.http.request("POST", "/encode", BAD_BODIES[name], {"Content-Type": "application/json"})
    answer.check_problem(400)


def test_another_content_type_is_415(qwen: Daemon) -> None:
    qwen.http.request("POST", "/encode", b"<a/>", {"Content-Type": "text/xml"}).check_problem(415)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/encode", 405), ("POST", "/livez", 405), ("GET", "/nothing", 404)]
)
def test_a_wrong_method_or_path_is_said(qwen: Daemon, method: str, path: str, status: int) -> None:
    qwen.http.request(method, path).check_problem(status)


def test_a_body_over_96_mib_is_refused_from_its_length_before_it_is_sent(qwen: Daemon) -> None:
    """Only the head is sent: the answer comes without a byte of the body."""
    connection = qwen.http.connection()
    try:
        connection.putrequest("POST", "/encode")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(96 * MEBIBYTE + 1))
        connection.endheaders()
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        problem = Answer(response.status, headers, response.read()).check_problem(413)
    finally:
        connection.close()
    assert str(96 * MEBIBYTE) in problem["message"], problem


def test_a_chunked_body_over_96_mib_is_refused_while_it_comes(qwen: Daemon) -> None:
    """The daemon may close before all is sent; it must be well afterwards."""
    chunk = b'{"req_id": "' + b"a" * MEBIBYTE
    try:
        answer = qwen.tcp.request(
            "POST", "/encode", (chunk for _ in range(98)), {"Content-Type": "application/json"}
        )
    except (BrokenPipeError, ConnectionResetError):
        pass
    else:
        answer.check_problem(413)
    assert qwen.http.get("/livez").status == 200
    assert qwen.http.release(qwen.http.encode(PNG).handle).status == 200


def test_a_body_of_a_compressed_encoding_is_refused(qwen: Daemon) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    qwen.http.request("POST", "/encode", zlib.compress(b"{}"), headers).check_problem(415)


def test_every_truncation_of_a_picture_is_an_answer_and_never_a_dead_worker(qwen: Daemon) -> None:
    pids = qwen.worker_pids()
    with Load(qwen.http, threads=8) as load:
        for file in (JPEG, PNG, picture_bytes(50, 50, 4, "WEBP"), picture_bytes(50, 50, 5, "GIF")):
            for part in range(16):
                load.post(file[: len(file) * part // 16])
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            if outcome.answer.status == 200:  # the end of some formats carries no picture data
                qwen.http.release(outcome.answer.handle)
            else:
                outcome.answer.check_problem(400, 415, 422, req_id=outcome.req_id)
    assert qwen.worker_pids() == pids
    wait_all_free(qwen.attach_socket)


def test_nothing_of_the_payload_reaches_the_log(qwen: Daemon) -> None:
    secret = base64.b64encode(b"the payload is nobody's business" * 8).decode()
    qwen.http.encode(f"data:image/png;base64,{secret}").check_problem(400, 415, 422)
    qwen.http.encode(f"data:image/png;base64,{secret}!").check_problem(400, 415, 422)
    assert secret[:32] not in qwen.log()
