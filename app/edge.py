"""The outermost layer of the application: what every request gets, whatever its route.

A request id in and out, the log line, and an orderly end when an answer comes before the body has: the rest
of the body is read and thrown away for a while, because closing with unread bytes makes the kernel send a
reset that can destroy the answer, and because Hypercorn's queue of unread messages would block it for ever.
"""

import asyncio
import re
import uuid
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.logs import RequestNote

LINGER_S: Final = 5.0
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """ASGI application around the router."""

    def __init__(self, application: ASGIApp, *, log_requests: bool) -> None:
        self._application = application
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = Headers(scope=scope)
        note = RequestNote(_request_id(headers))
        scope["note"] = note
        exchange = _Exchange(headers, note.request_id, receive, send)
        try:
            await self._application(scope, exchange.receive, exchange.send)
        finally:
            if self._log_requests:
                note.log(scope["method"], scope["path"], exchange.status)


class _Exchange:
    """One request's two streams, watched."""

    def __init__(self, headers: Headers, request_id: str, receive: Receive, send: Send) -> None:
        self._request_id = request_id
        self._receive = receive
        self._send = send
        self._body_is_open = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.status = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._body_is_open = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._request_id
            if self._body_is_open:
                headers["Connection"] = "close"
        elif self._body_is_open and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            return
        await self._send(message)

    async def _linger(self) -> None:
        """The answer is out; the body is not in. Read on for a while, then end the answer, still reading."""
        rest = asyncio.create_task(self._throw_away())
        try:
            await asyncio.wait([rest], timeout=LINGER_S)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            rest.cancel()
            with suppress(asyncio.CancelledError):
                await rest

    async def _throw_away(self) -> None:
        while self._body_is_open:
            await self.receive()


def _request_id(headers: Headers) -> str:
    """The client's X-Request-Id if it is one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
