"""app.edge: request ids, log lines, and answers that come before the body has."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from app.edge import Edge
from tests.app.serving import exchange, post, run, served, status_of


async def at_once(request: Request) -> PlainTextResponse:
    return PlainTextResponse("early")


APPLICATION = Edge(Starlette(routes=[Route("/", at_once, methods=["GET", "POST"])]), log_requests=True)


def ask(*headers: str) -> bytes:
    lines = ["GET /?token=secret HTTP/1.1", "Host: x", "Connection: close", *headers]

    async def main() -> bytes:
        async with served(APPLICATION) as port:
            return await exchange(port, ("\r\n".join(lines) + "\r\n\r\n").encode())

    return run(main())


def test_a_request_id_is_echoed() -> None:
    assert b"x-request-id: my-id.1:2_3\r\n" in ask("X-Request-Id: my-id.1:2_3")


@pytest.mark.parametrize("bad", ["a b", "a" * 129, "<script>", "é"])
def test_a_request_id_that_is_none_is_replaced(bad: str) -> None:
    answer = ask(f"X-Request-Id: {bad}")
    assert status_of(answer) == 200
    assert b"x-request-id: " in answer
    assert bad.encode() not in answer


def test_the_log_line_has_the_path_and_never_the_query(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="encoderd.request"):
        ask()
    (record,) = [one for one in caplog.records if one.name == "encoderd.request"]
    assert record.getMessage() == "GET /"
    assert "secret" not in str(record.__dict__)


@pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
def test_an_answer_before_the_body_arrives_whole_even_if_the_client_sends_first(size: int) -> None:
    """More than Hypercorn's queue of ten messages holds: without the edge this request hangs for ever."""

    async def main() -> bytes:
        async with served(APPLICATION) as port:
            return await exchange(port, post("/", bytes(size)))

    answer = run(main())
    assert status_of(answer) == 200
    assert answer.endswith(b"early")


def test_a_connection_goes_on_after_requests_without_a_body() -> None:
    async def main() -> None:
        async with served(APPLICATION) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for request in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n"
                            b"Content-Length: 0\r\n\r\n") * 3:  # fmt: skip
                writer.write(request)
                await reader.readuntil(b"early")
            writer.close()
            await writer.wait_closed()

    run(main())
