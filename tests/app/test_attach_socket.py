"""app.attach_socket: the listening socket, its file and its mode."""

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from app.engine import Engine
from app.errors import ConfigError
from shm.client import connect
from tests.app.support import on_loop, serve_config


@on_loop
async def test_the_socket_is_closed_to_others_and_removed_at_the_end(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    path = Path(config.attach_socket)
    async with Engine(config):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


@on_loop
async def test_a_stale_socket_file_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    Path(config.attach_socket).parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(config.attach_socket)
    async with Engine(config):
        with pytest.raises(ConfigError, match="another daemon listens"):
            async with Engine(config):
                raise AssertionError("two engines on one socket")
        (await asyncio.to_thread(connect, config.attach_socket)).close()


@on_loop
async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    path = Path(config.attach_socket)
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        async with Engine(config):
            raise AssertionError("it must not start")
    assert path.read_text() == "precious"


@on_loop
async def test_an_inherited_socket_is_served_and_its_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "inherited.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        config = serve_config(tmp_path, attach_socket=str(path), attach_fd=listener.detach())
        async with Engine(config):
            (await asyncio.to_thread(connect, str(path))).close()
    assert path.exists()
