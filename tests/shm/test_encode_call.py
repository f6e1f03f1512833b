"""shm.encode_call: one POST /encode to a real HTTP server, on TCP and on a Unix socket."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shm.encode_call import EncodeRefused, EncodeResult, ItemAnswer, post_encode
from shm.errors import SessionClosed, WaitTimeout
from shm.messages import Handle

HANDLE = Handle("00" * 16, 0, 1, 2, 3, 8192, 128, 4, 8, "float32", "secret", "/run/attach.sock")
ANSWER = {
    "req_id": "r1", "modality": "image", "num_parts": 1, "part_idx": 0, "grid_thw": [[1, 4, 4]],
    "rows": 4, "dim": 8, "embedding_size": 128, "embedding_len": 4, "embedding_dim": 8,
    "dtype": "float32", "state": "ready",
    "items": [{"row_start": 0, "row_count": 4, "grid_thw": [[1, 4, 4]], "width": 56, "height": 28}],
    "timings": {"ingest": 0.5, "queue": 0, "preprocess": 1.5, "forward": 2, "copy": 0.1, "total": 4.2},
    "handle": msgspec.to_builtins(HANDLE), "a_later_field": {"x": 1},
}  # fmt: skip


class HttpServer:
    """Answers every POST with `status`, `headers` and `body`; keeps what was posted last."""

    def __init__(self, server: HTTPServer) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = json.dumps(ANSWER).encode()
        self.path = ""
        self.posted: dict[str, Any] = {}
        self.timeout_ms = ""
        self._server = server
        server.RequestHandlerClass = self._handler()
        self._thread = threading.Thread(target=server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.path = self.path
                owner.timeout_ms = self.headers["X-Request-Timeout-Ms"]
                owner.posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(owner.status)
                for name, value in owner.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(owner.body)))
                self.end_headers()
                self.wfile.write(owner.body)

            def address_string(self) -> str:
                return "test"

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


class UnixHttpServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


@pytest.fixture(params=["tcp", "unix"])
def where_and_http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, HttpServer]]:
    if request.param == "tcp":
        server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        where = f"127.0.0.1:{server.server_port}"
    else:
        server = UnixHttpServer(str(tmp_path / "http.sock"), BaseHTTPRequestHandler)  # type: ignore[arg-type]
        where = f"unix:{tmp_path / 'http.sock'}"
    http = HttpServer(server)
    yield where, http
    http.close()


def post(where: str, items: Any, timeout: float = 60.0, **fields: Any) -> EncodeResult:
    return post_encode(
        where,
        items,
        modality="image",
        req_id=fields.pop("req_id", None),
        wait="ready",
        timeout=timeout,
        fields=fields,
    )


def test_the_daemon_is_told_how_long_the_caller_waits(where_and_http: tuple[str, HttpServer]) -> None:
    where, http = where_and_http
    post(where, b"picture", timeout=1.5)
    assert http.timeout_ms == "1500"
    post(where, b"picture", timeout=0.0001)
    assert http.timeout_ms == "1"


def test_an_answer_comes_back_typed(where_and_http: tuple[str, HttpServer]) -> None:
    where, http = where_and_http
    handle, answer = post(where, b"picture", req_id="r1", num_parts=2)
    assert handle == answer.handle == HANDLE
    assert (answer.req_id, answer.rows, answer.dim, answer.dtype, answer.state) == (
        "r1",
        4,
        8,
        "float32",
        "ready",
    )
    assert answer.items == [ItemAnswer(0, 4, [[1, 4, 4]], 56, 28)]
    assert answer.timings.forward == 2
    assert http.path == "/encode"
    assert http.posted == {
        "req_id": "r1", "mm_items": [base64.b64encode(b"picture").decode()], "modality": "image",
        "wait": "ready", "num_parts": 2,
    }  # fmt: skip


def test_items_are_sent_as_they_are_and_bytes_as_base64(where_and_http: tuple[str, HttpServer]) -> None:
    where, http = where_and_http
    url = {"type": "image_url", "image_url": {"url": "http://example.org/x.png"}}
    post(where, ["http://example.org/y.png", url, bytearray(b"a"), memoryview(b"bc")])
    assert http.posted["mm_items"] == ["http://example.org/y.png", url, "YQ==", "YmM="]
    post(where, "data:image/png;base64,YQ==")
    assert http.posted["mm_items"] == ["data:image/png;base64,YQ=="]
    first = http.posted["req_id"]
    post(where, url)
    assert http.posted["mm_items"] == [url]
    assert http.posted["req_id"] != first


def test_an_error_is_typed_with_the_daemons_own_words(where_and_http: tuple[str, HttpServer]) -> None:
    where, http = where_and_http
    http.status, http.headers = 429, {"Retry-After": "2"}
    http.body = b'{"status": "error", "message": "too many requests", "code": "queue_full", "req_id": "r"}'
    with pytest.raises(EncodeRefused, match="429: too many requests") as caught:
        post(where, b"x")
    assert (caught.value.status, caught.value.message) == (429, "too many requests")
    assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 2.0)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"rows": "many"}'])
@pytest.mark.parametrize("status", [200, 502])
def test_an_answer_that_is_not_ours_is_refused(
    where_and_http: tuple[str, HttpServer], status: int, body: bytes
) -> None:
    where, http = where_and_http
    http.status, http.body = status, body
    with pytest.raises(EncodeRefused) as caught:
        post(where, b"x")
    assert caught.value.status == status
    assert caught.value.retry_after_s is None


def test_where_nobody_listens_the_session_is_over(tmp_path: Path) -> None:
    for where in (f"unix:{tmp_path / 'none'}", "127.0.0.1:1"):
        with pytest.raises(SessionClosed):
            post(where, b"x")


def test_where_nobody_answers_the_wait_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WaitTimeout):
        post(f"127.0.0.1:{silent.getsockname()[1]}", b"x", timeout=-4.95)
