"""app.connection: HTTP/1.1 and nothing else, and headers that must arrive."""

from __future__ import annotations

import asyncio

import h11
import pytest
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, RawData
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.typing import ConnectionState
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.connection import Http1Protocol
from tests.app.serving import config, exchange, run, served, status_of


async def version(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.scope["http_version"])


APPLICATION = Starlette(routes=[Route("/", version)])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"


def test_an_answers_head_leaves_with_its_body() -> None:
    async def main() -> list[Event]:
        sent: list[Event] = []

        async def send(event: Event) -> None:
            sent.append(event)

        context = WorkerContext(None)
        protocol = Http1Protocol(None, Config(), context, None, ConnectionState({}), False, None, None, send)
        protocol.connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert isinstance(protocol.connection.next_event(), h11.Request)
        await protocol.stream_send(Response(1, [(b"content-length", b"4")], 200))
        await protocol.stream_send(Body(1, b"body"))
        await protocol.stream_send(EndBody(1))
        return sent

    (answer,) = run(main())
    assert isinstance(answer, RawData)
    assert answer.data.startswith(b"HTTP/1.1 200")
    assert answer.data.endswith(b"\r\n\r\nbody")


@pytest.mark.parametrize("request_bytes", [PREFACE, PREFACE + SETTINGS_FRAME])
def test_the_http2_preface_gets_505_and_the_end_of_the_connection(request_bytes: bytes) -> None:
    async def main() -> bytes:
        async with served(APPLICATION) as port:
            return await exchange(port, request_bytes)

    answer = run(main())
    assert answer.startswith(b"HTTP/1.1 505")
    assert SETTINGS_FRAME not in answer


def test_an_upgrade_to_h2c_is_ignored() -> None:
    request = (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    )

    async def main() -> bytes:
        async with served(APPLICATION) as port:
            return await exchange(port, request)

    answer = run(main())
    assert status_of(answer) == 200
    assert answer.endswith(b"1.1")


@pytest.mark.parametrize("request_line", [b"GET / HTTP/3.0", b"GET / HTTP/1.9", b"nonsense"])
def test_other_versions_and_nonsense_are_refused(request_line: bytes) -> None:
    async def main() -> bytes:
        async with served(APPLICATION) as port:
            return await exchange(port, request_line + b"\r\nHost: x\r\n\r\n")

    assert status_of(run(main())) in (400, 505)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    async def main() -> bytes:
        async with served(APPLICATION, config(header_timeout_s=0.05)) as port:
            return await exchange(port, sent)

    assert run(main()) == b""


def test_an_answer_that_nobody_reads_ends_the_connection() -> None:
    async def main() -> None:
        is_over = asyncio.Event()

        async def talk(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": bytes(64 << 20)})
            while (await receive())["type"] != "http.disconnect":
                pass
            is_over.set()

        async with served(talk, config(body_idle_timeout_s=0.05)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await is_over.wait()
            writer.close()

    run(main())


def test_the_header_limit_runs_again_for_the_next_request_and_not_while_idle() -> None:
    """The second request comes when the limit has passed since the first; only its own headers count."""

    async def main() -> None:
        async with served(APPLICATION, config(header_timeout_s=0.05)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readuntil(b"1.1")
                await reader.readuntil(b"1.1")
                # Another connection's header limit passes meanwhile: this one must not have ended with it.
                assert await exchange(port, b"GET") == b""
            writer.write(b"GET / HTTP/1.1\r\n")
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    run(main())


def test_a_client_that_resets_leaves_the_server_well() -> None:
    async def main() -> bytes:
        async with served(APPLICATION) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.transport.abort()
            return await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert status_of(run(main())) == 200
