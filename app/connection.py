"""One HTTP connection: Hypercorn's, with HTTP/1.1 only and limits on how long headers and answers may take.

Hypercorn 0.18 turns a cleartext connection to HTTP/2 when it sees the preface ("PRI * HTTP/2.0") or an
Upgrade: h2c header, and HTTP/2 brings rapid resets without limit. Its TCPServer builds the protocol switch
itself, so run() is repeated here without it. Used by `app.listener`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import h11
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

HTTP_VERSIONS: Final = (b"1.0", b"1.1")


class HttpVersionRefused(Exception):
    """The client speaks a version that is not served; it has been told 505."""


class Http1Protocol(H11Protocol):  # type: ignore[misc]  # hypercorn's types are not checked here
    """Hypercorn's HTTP/1.1 that stays HTTP/1.1: an Upgrade to h2c is ignored, the preface gets 505.

    An answer's head leaves with the first bytes of its body: one system call and one wake-up of the client.
    """

    _head = b""  # of an answer, not sent yet

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version not in HTTP_VERSIONS:
            await self._send_error_response(505)
            raise HttpVersionRefused

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        self._head += data or b""
        if isinstance(event, h11.Response):
            return
        data, self._head = self._head, b""
        if data:
            await self.send(RawData(data))

    @property
    def headers_incomplete(self) -> bool:
        """Some bytes of a request have come, but not yet all of its headers."""
        return self.connection.their_state is h11.IDLE and bool(self.connection.trailing_data[0])


class Connection(TCPServer):  # type: ignore[misc]
    """One accepted socket, from accept to close."""

    def __init__(
        self,
        application: AppWrapper,
        config: Config,
        context: WorkerContext,
        header_timeout_s: float,
        send_timeout_s: float,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        super().__init__(application, asyncio.get_running_loop(), config, context, {}, reader, writer)
        self._header_timeout_s = header_timeout_s
        self._send_timeout_s = send_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._client_is_gone = False

    async def run(self) -> None:
        """Serve until either side closes."""
        socket = self.writer.get_extra_info("socket")
        try:
            async with TaskGroup(self.loop) as task_group:
                self._task_group = task_group
                self.protocol = Http1Protocol(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState({}),
                    False,
                    parse_socket_addr(socket.family, socket.getpeername()),
                    parse_socket_addr(socket.family, socket.getsockname()),
                    self.protocol_send,
                )
                await self.protocol.initiate()
                await self.idle_task.restart(task_group, self._idle_timeout)
                self._start_header_timer()
                await self._read_data()
        except (OSError, HttpVersionRefused):
            pass
        except ExceptionGroup as group:
            # The task group wraps what the reading raised; anything else is a bug and goes up.
            if group.split((OSError, HttpVersionRefused))[1] is not None:
                raise
        finally:
            self._stop_header_timer()
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """What the protocol wants done; "not idle" means that a request's headers are whole."""
        if isinstance(event, RawData):
            await self._within_send_limit(super().protocol_send(event))
            return
        if isinstance(event, Updated):
            if not event.idle:
                self._stop_header_timer()
            elif self._client_is_gone:
                return  # nobody will send a next request: the idle task would only keep the socket open
        await super().protocol_send(event)

    async def _close(self) -> None:
        await self._within_send_limit(super()._close())

    async def _within_send_limit(self, sending: Coroutine[Any, Any, None]) -> None:
        """A client that reads nothing loses its connection, and with it what waits to be sent."""
        timer = self.loop.call_later(self._send_timeout_s, self.writer.transport.abort)
        try:
            await sending
        finally:
            timer.cancel()

    async def _read_data(self) -> None:
        while data := await self._read():
            await self.protocol.handle(RawData(data))
            if self.protocol.headers_incomplete:
                self._start_header_timer()
        self._client_is_gone = True
        await self.protocol.handle(Closed())
        await self.idle_task.stop()  # the task group waits for it

    async def _read(self) -> bytes:
        try:
            return bytes(await self.reader.read(MAX_RECV))
        except OSError:
            return b""

    def _start_header_timer(self) -> None:
        """Running from the connection's or the request's first byte until its headers are whole."""
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self.writer.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
