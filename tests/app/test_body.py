"""app.body: limits of bytes and time on a body, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.body import read_body
from app.config import ServeConfig
from app.edge import Edge
from app.errors import RequestError
from app.problem import problem_response
from tests.app.serving import config, exchange, post, run, served, status_of

LIMIT = 100_000


def application(settings: ServeConfig) -> ASGIApp:
    """Answers with the length of the body."""

    async def count(request: Request) -> Response:
        return PlainTextResponse(str(len(await read_body(request.receive, request.headers, settings, LIMIT))))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return problem_response(error, request.scope["note"].request_id, "")

    routes = [Route("/", count, methods=["POST"])]
    return Edge(Starlette(routes=routes, exception_handlers={RequestError: refuse}), log_requests=False)


def send(request: bytes, settings: ServeConfig | None = None) -> bytes:
    used = settings or config()

    async def main() -> bytes:
        async with served(application(used), used) as port:
            return await exchange(port, request)

    return run(main())


@pytest.mark.parametrize("size", [0, 1, 70_000, LIMIT])
def test_a_body_within_the_limit_is_read_whole(size: int) -> None:
    assert send(post("/", bytes(size))).endswith(b"\r\n\r\n" + str(size).encode())


def test_a_length_over_the_limit_is_refused_before_a_byte_of_it_has_come() -> None:
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode()

    async def main() -> bytes:
        async with served(application(config())) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            answer = await reader.readuntil(b"}")
            writer.close()
            await writer.wait_closed()
            return answer

    answer = run(main())
    assert status_of(answer) == 413
    assert str(LIMIT).encode() in answer
    assert b"connection: close" in answer


def test_a_client_that_sends_everything_before_it_reads_still_gets_its_413() -> None:
    assert status_of(send(post("/", bytes(20 * LIMIT)))) == 413


def test_a_chunked_body_is_counted_while_it_comes() -> None:
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert status_of(send(head + chunk * 2 + b"0\r\n\r\n")) == 413
    assert send(head + chunk + b"0\r\n\r\n").endswith(b"65536")


def test_a_body_that_stops_coming_is_408_and_names_the_limit() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf"
    answer = send(head, config(body_idle_timeout_s=0.05))
    assert status_of(answer) == 408
    assert b"0.05 s" in answer


def test_a_body_that_trickles_is_408_by_the_total() -> None:
    settings = config(body_idle_timeout_s=0.2, body_total_timeout_s=0.3)

    async def main() -> bytes:
        async with served(application(settings), settings) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
            answer = asyncio.create_task(reader.readuntil(b"}"))
            while not answer.done():
                writer.write(b"x")
                await asyncio.wait([answer], timeout=0.02)
            writer.close()
            return await answer

    answer = run(main())
    assert status_of(answer) == 408
    assert b"within 0.3 s" in answer


@pytest.mark.parametrize(
    "header",
    ["Content-Type: text/xml", "Content-Encoding: gzip", "Content-Type: application/x-www-form-urlencoded"],
)
def test_only_plain_json_is_read(header: str) -> None:
    assert status_of(send(post("/", b"{}", header))) == 415


@pytest.mark.parametrize(
    "header", ["Content-Type: application/json; charset=utf-8", "Content-Type: text/x+json"]
)
def test_every_json_type_is_read(header: str) -> None:
    assert status_of(send(post("/", b"{}", header))) == 200
