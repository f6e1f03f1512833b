"""The listening sockets and every connection on them. Opened and closed by `app.server`."""

import asyncio
import logging
import socket
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from app.config import ServeConfig
from app.connection import Connection
from app.errors import ConfigError
from app.unix_socket import listening_unix_socket

BACKLOG: Final = 4096
MAX_CONNECTIONS: Final = 4096
KEEP_ALIVE_S: Final = 75.0
MAX_HEADER_BYTES: Final = 64 * 1024
CLOSE_TIMEOUT_S: Final = 2.0


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. ConfigError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {error.strerror}") from None
    return listener


def unix_listener(path: str) -> AbstractContextManager[socket.socket]:
    """A listening Unix socket; its file is removed at the end. ConfigError when the path is in use."""
    return listening_unix_socket(path, socket.SOCK_STREAM, BACKLOG, "--uds")


class Listener:
    """Async context manager: accepting from enter to exit, every connection closed at exit."""

    def __init__(self, application: ASGIApp, config: ServeConfig, sockets: list[socket.socket]) -> None:
        self._application = wrap_app(application, 0, "asgi")
        self._config = config
        self._sockets = sockets
        self._hypercorn = _hypercorn_config()
        self._context = WorkerContext(None)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for listening in self._sockets:
            listening.setblocking(False)
            self._servers.append(await asyncio.start_server(self._accepted, sock=listening, backlog=BACKLOG))
        return self

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await Connection(
                self._application,
                self._hypercorn,
                self._context,
                self._config.header_timeout_s,
                self._config.body_idle_timeout_s,
                reader,
                writer,
            )
        finally:
            self._connections.discard(task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        # Idle connections close now, busy ones after their answer.
        await self._context.terminated.set()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_TIMEOUT_S)
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_TIMEOUT_S)


def _hypercorn_config() -> Config:
    """Hypercorn reads its limits from here; sockets, signals and grace are ours."""
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("encoderd.http")
    config.include_server_header = False
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1 << 30
    return config
