"""app.listener: sockets bound, replaced when stale, removed at the end; connections closed in order."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from app.errors import ConfigError
from app.listener import Listener, bind_tcp, unix_listener
from tests.app.serving import config, exchange, run, served, status_of

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APPLICATION = Starlette(routes=[Route("/", hello)])


def test_a_taken_port_is_a_configuration_error_that_names_it() -> None:
    with bind_tcp("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            bind_tcp("127.0.0.1", port)


def test_an_ipv6_address_is_bound_too() -> None:
    with bind_tcp("::1", 0) as listening:
        assert listening.family == socket.AF_INET6


def test_a_unix_socket_serves_its_group_and_goes_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"

    async def main() -> bytes:
        with unix_listener(str(path)) as listening:
            assert stat.S_IMODE(path.stat().st_mode) & ~0o660 == 0
            async with Listener(APPLICATION, config(), [listening]):
                reader, writer = await asyncio.open_unix_connection(str(path))
                writer.write(REQUEST)
                answer = await reader.read()
                writer.close()
                await writer.wait_closed()
                return answer

    assert status_of(run(main())) == 200
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with unix_listener(path), pytest.raises(ConfigError, match="another daemon"), unix_listener(path):
        pass


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError), unix_listener(str(path)):
        pass
    assert path.read_text() == "precious"


def test_a_socket_that_somebody_put_in_our_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with unix_listener(str(path)):
        os.unlink(path)
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_idle_connections_are_closed_when_the_listener_ends() -> None:
    async def main() -> bytes:
        async with served(APPLICATION) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"hello")
        rest = await reader.read()
        writer.close()
        await writer.wait_closed()
        return rest

    assert run(main()) == b""


def test_two_hundred_connections_at_once_are_all_answered() -> None:
    async def main() -> list[bytes]:
        async with served(APPLICATION) as port:
            return await asyncio.gather(*(exchange(port, REQUEST) for _ in range(200)))

    assert {status_of(answer) for answer in run(main())} == {200}
