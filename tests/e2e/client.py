"""HTTP for the tests: one connection per request, standard library only, over TCP or a Unix socket."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shm.messages import Handle

SOCKET_TIMEOUT_S = 120.0  # a hang guard
LEAKS = ("0x", "/dev/shm", "/tmp/", "Traceback", 'File "')


@dataclass(frozen=True)
class Answer:
    """One HTTP response, read to its end."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        decoded = json.loads(self.body)
        assert isinstance(decoded, dict), self
        return decoded

    @property
    def handle(self) -> Handle:
        """The handle of a 200 answer."""
        assert self.status == 200, self
        return msgspec.convert(self.json["handle"], Handle)

    def check_problem(self, *statuses: int, req_id: str | None = None) -> dict[str, Any]:
        """This is one typed error: problem+json that SGLang's client can read too, and that leaks nothing.

        A 429 or 503 may come before the body was read: then the daemon does not know the req_id yet.
        """
        assert self.status in statuses, self
        assert self.headers["content-type"].startswith("application/problem+json"), self.headers
        problem = self.json
        assert problem["status"] == "error", problem
        assert isinstance(problem["message"], str), problem
        assert problem["message"], problem
        assert isinstance(problem["title"], str), problem
        assert isinstance(problem["code"], str), problem
        if req_id is not None:
            early = self.status in (429, 503) and problem["req_id"] == ""
            assert early or problem["req_id"] == req_id, problem
        if self.status in (429, 503):
            assert int(self.headers["retry-after"]) >= 0
        self.check_leaks_nothing()
        return problem

    def check_leaks_nothing(self) -> None:
        """No address, path or traceback in what a client can see."""
        text = self.body.decode("utf-8", "replace") + repr(self.headers)
        found = [leak for leak in LEAKS if leak in text]
        assert not found, (found, text)


class _UnixConnection(http.client.HTTPConnection):
    """http.client over AF_UNIX."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SOCKET_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Http:
    """The daemon's HTTP side. address: "unix:/path" or "host:port"."""

    address: str

    def connection(self) -> http.client.HTTPConnection:
        """A fresh connection, not yet connected."""
        if self.address.startswith("unix:"):
            return _UnixConnection(self.address.removeprefix("unix:"))
        host, _, port = self.address.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=SOCKET_TIMEOUT_S)

    def raw_socket(self) -> socket.socket:
        """A connected stream socket, for clients that misbehave below HTTP."""
        connection = self.connection()
        connection.connect()
        return connection.sock

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on its own connection. body: bytes, or an iterable of bytes (sent chunked)."""
        connection = self.connection()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post_json(self, path: str, value: Any, headers: dict[str, str] | None = None) -> Answer:
        body = json.dumps(value).encode()
        return self.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})

    def encode(
        self,
        items: Any,
        *,
        req_id: str | None = None,
        modality: str = "image",
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """POST /encode. items: bytes (sent as data URLs), strings or dicts (sent as they are), or a list."""
        listed = items if isinstance(items, list) else [items]
        sent = [data_url(item) if isinstance(item, bytes) else item for item in listed]
        body = {"req_id": req_id or uuid.uuid4().hex, "mm_items": sent, "modality": modality, **fields}
        return self.post_json("/encode", body, headers)

    def release(self, handle: Handle) -> Answer:
        """POST /release: whoever holds the handle may end its lease."""
        return self.post_json("/release", {"handle": msgspec.to_builtins(handle)})

    def server_info(self) -> dict[str, Any]:
        """The daemon's own view of itself: workers, engine statistics, limits."""
        answer = self.get("/server_info")
        assert answer.status == 200, answer
        return answer.json

    def workers(self) -> list[dict[str, Any]]:
        """Every worker place: index, epoch, state, pid, in_flight, restarts, reason."""
        listed = self.server_info()["workers"]
        assert isinstance(listed, list)
        return listed

    def all_ready(self) -> bool:
        """Whether every place has a ready worker."""
        return all(worker["state"] == "ready" for worker in self.workers())

    def in_flight(self) -> int:
        """Attempts at the workers now."""
        return sum(worker["in_flight"] for worker in self.workers())

    def arena_is_free(self) -> bool:
        """Whether every page of the input arena is free."""
        arena = self.server_info()["engine"]["arena"]
        return bool(arena["free_bytes"] == arena["total_bytes"])


def data_url(data: bytes, media_type: str = "application/octet-stream") -> str:
    """data: URL of these bytes."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def until(holds: Callable[[], bool], what: str) -> None:
    """Ask again until it holds. Each turn must be a round trip to the daemon, so nobody spins or sleeps."""
    guard = time.monotonic() + SOCKET_TIMEOUT_S
    while not holds():
        assert time.monotonic() < guard, f"never: {what}"
