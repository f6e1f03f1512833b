"""Real sockets for tests of the HTTP half: an ASGI application on a Listener, and raw clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import uvloop
from starlette.types import ASGIApp

from app.config import ServeConfig
from app.listener import Listener, bind_tcp

Result = TypeVar("Result")
CONFIG = ServeConfig(checkpoint="none", tower="stub", arena_bytes=200 << 20)


def config(**changes: Any) -> ServeConfig:
    """The default configuration with some fields changed."""
    return msgspec.structs.replace(CONFIG, **changes)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """main on the daemon's own kind of loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@asynccontextmanager
async def served(application: ASGIApp, settings: ServeConfig = CONFIG) -> AsyncIterator[int]:
    """The application behind a Listener; the port."""
    listening = bind_tcp("127.0.0.1", 0)
    port = listening.getsockname()[1]
    async with Listener(application, settings, [listening]):
        yield port
    listening.close()


async def exchange(port: int, request: bytes) -> bytes:
    """Send bytes, then read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A whole POST that asks for the connection to be closed."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", "Connection: close"]
    return ("\r\n".join([*lines, *headers]) + "\r\n\r\n").encode() + body


def status_of(answer: bytes) -> int:
    """The status code of a raw answer."""
    return int(answer.split(b" ", 2)[1])


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[int]:
    """A TCP server on 127.0.0.1 that does what handler says; the port."""

    handling: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        try:
            await handler(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the client, or the test, has gone, as some tests want
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            handling.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, family=socket.AF_INET)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in handling:
            task.cancel()
        if handling:
            await asyncio.wait(set(handling))
