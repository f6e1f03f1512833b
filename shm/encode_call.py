"""POST /encode for Session.encode, for items that do not go over its rings: one request, on TCP or a Unix
socket, with the standard library.

The answer's format lives here too: EncodeAnswer is what prefill reads of app's answer; fields that it does
not know are skipped.
"""

import http.client
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from shm.errors import SessionClosed, ShmError, WaitTimeout
from shm.messages import Handle, ItemAux

# One item: bytes (sent as base64), a URL, data URL, base64 or path as text, or a dict in OpenAI's shape.
Item = bytes | bytearray | memoryview | str | Mapping[str, Any]
# Time for the answer to travel after the daemon's own time limit has ended the request.
_GRACE_S: Final = 5.0
_TIMEOUT_MAX_MS: Final = 999_999_999  # the longest that the daemon reads


class EncodeRefused(ShmError):
    """The daemon answered with an error. status: HTTP's; message: the daemon's own text.

    code: its machine-readable cause; retry_after_s: when to come again, None if it named no time.
    """

    def __init__(self, status: int, message: str, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


class ItemAnswer(msgspec.Struct, frozen=True):
    """One item's rows: row_start until row_start + row_count. grid_thw: [[t, h, w], ...] in patches."""

    row_start: int
    row_count: int
    grid_thw: list[list[int]] = []
    width: int = 0
    height: int = 0
    aux: ItemAux = ItemAux()


class TimingsAnswer(msgspec.Struct, frozen=True):
    """Milliseconds. ingest: until the bytes were in the arena; the rest as the worker measured it."""

    ingest: float = 0.0
    queue: float = 0.0
    preprocess: float = 0.0
    forward: float = 0.0
    copy: float = 0.0
    total: float = 0.0


class EncodeAnswer(msgspec.Struct, frozen=True):
    """What POST /encode answers. rows x dim of dtype; state is "ready", or "shape" while rows are coming."""

    req_id: str
    modality: str
    rows: int
    dim: int
    dtype: str
    handle: Handle
    state: str = "ready"
    grid_thw: list[list[int]] = []
    items: list[ItemAnswer] = []
    timings: TimingsAnswer = TimingsAnswer()


class EncodeResult(NamedTuple):
    """What post_encode returns: attach `handle`; `answer` says the rest."""

    handle: Handle
    answer: EncodeAnswer


class _Problem(msgspec.Struct):
    """The parts of a problem+json body that a caller can act on."""

    message: str = "the daemon gave no reason"
    code: str = ""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def post_encode(
    where: str,
    mm_items: Item | Sequence[Item],
    *,
    modality: str,
    req_id: str | None,
    wait: str,
    timeout: float,
    fields: Mapping[str, Any],
) -> EncodeResult:
    """One POST /encode. where: "unix:/path" or "host:port". timeout: seconds, the daemon's and ours.

    EncodeRefused for an answer that is not 2xx, WaitTimeout if none came, SessionClosed if nobody serves.
    """
    items = items_of(mm_items)
    request = {
        "req_id": req_id or secrets.token_hex(16),
        "mm_items": items,  # bytes become base64 on the way
        "modality": modality,
        "wait": wait,
        **fields,
    }
    status, retry_after, body = _exchange(
        _connection(where, timeout + _GRACE_S), msgspec.json.encode(request), timeout
    )
    if not 200 <= status < 300:
        raise _refusal(status, retry_after, body)
    try:
        answer = msgspec.json.decode(body, type=EncodeAnswer)
    except msgspec.MsgspecError as error:
        raise EncodeRefused(status, f"the answer cannot be understood: {error}") from None
    return EncodeResult(answer.handle, answer)


def items_of(mm_items: Item | Sequence[Item]) -> list[Item]:
    """One item, or several, as a list."""
    if isinstance(mm_items, str | bytes | bytearray | memoryview | Mapping):
        return [mm_items]
    return list(mm_items)


def _connection(where: str, timeout: float) -> http.client.HTTPConnection:
    if where.startswith("unix:"):
        return _UnixConnection(where.removeprefix("unix:"), timeout)
    host, _, port = where.rpartition(":")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)


def _exchange(
    connection: http.client.HTTPConnection, body: bytes, timeout: float
) -> tuple[int, str | None, bytes]:
    """(status, Retry-After, body) of one request, which the daemon drops after timeout seconds."""
    headers = {
        "Content-Type": "application/json",
        "X-Request-Timeout-Ms": str(min(max(1, round(timeout * 1000)), _TIMEOUT_MAX_MS)),
    }
    try:
        connection.request("POST", "/encode", body, headers)
        response = connection.getresponse()
        return response.status, response.getheader("Retry-After"), response.read()
    except TimeoutError:
        raise WaitTimeout("the daemon did not answer in time") from None
    except (OSError, http.client.HTTPException) as error:
        raise SessionClosed(f"the daemon does not answer over HTTP ({type(error).__name__})") from None
    finally:
        connection.close()


def _refusal(status: int, retry_after: str | None, body: bytes) -> EncodeRefused:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem()
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return EncodeRefused(status, problem.message, problem.code, seconds)
