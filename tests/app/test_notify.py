"""app.notify: what systemd hears from us and what it gives us."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.notify import FIRST_INHERITED_FD, Notifier, take_environment

TAKE = """
import os, socket, sys
from app.errors import ConfigError
from app.notify import take_environment
os.environ["LISTEN_PID"] = str(os.getpid())
try:
    got = take_environment(os.environ, os.getpid())
except ConfigError as error:
    print("refused", error)
else:
    families = [one.family.name for one in got.http_sockets]
    print(families, got.attach_socket is not None, "LISTEN_FDS" in os.environ)
"""


def test_messages_reach_the_socket_and_nothing_happens_without_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        with Notifier(str(tmp_path / "notify")) as notifier:
            notifier.status("loading")
            notifier.ready()
            notifier.watchdog()
            notifier.stopping(44.5)
        sent = [systemd.recv(1000).decode() for _ in range(4)]
    assert sent[0] == "STATUS=loading"
    assert sent[1].startswith("READY=1")
    assert sent[2] == "WATCHDOG=1"
    assert sent[3].startswith("STOPPING=1")
    with Notifier("") as silent:
        silent.ready()
        assert not silent.connected


def test_an_abstract_address_works() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("")
        name = systemd.getsockname()
        with Notifier("@" + name[1:].decode()) as notifier:
            notifier.watchdog()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_the_environment_is_read_once_and_removed() -> None:
    environment = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7", "OTHER": "x"}
    taken = take_environment(environment, 7)
    assert (taken.notify_socket, taken.watchdog_s, taken.http_sockets) == ("/n", 30.0, ())
    assert environment == {"OTHER": "x"}


def test_what_is_meant_for_another_process_is_not_taken() -> None:
    environment = {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "8", "LISTEN_FDS": "1", "LISTEN_PID": "8"}
    taken = take_environment(environment, 7)
    assert (taken.watchdog_s, taken.http_sockets, taken.attach_socket) == (0.0, (), None)


def inherit(*sockets: socket.socket) -> str:
    """What a child says that got these sockets from descriptor 3 on."""
    source = [str(one.fileno()) for one in sockets]
    moves = " ".join(f"{FIRST_INHERITED_FD + index}<&{fd}" for index, fd in enumerate(source))
    environment = {"LISTEN_FDS": str(len(sockets)), "PYTHONPATH": "."}
    command = ["/bin/bash", "-c", f'exec "$0" -c "$1" {moves}', sys.executable, TAKE]
    done = subprocess.run(
        command, env=environment, pass_fds=[one.fileno() for one in sockets], capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr


def test_streams_become_http_sockets_and_a_seqpacket_the_attach_socket(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attach,
    ):
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "http"))
        attach.bind(str(tmp_path / "attach"))
        for one in (tcp, unix, attach):
            one.listen()
        assert inherit(tcp, unix, attach) == "['AF_INET', 'AF_UNIX'] True False"


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as closed:
        assert inherit(closed) == f"refused LISTEN_FDS: descriptor {FIRST_INHERITED_FD} does not listen"


def test_a_missing_descriptor_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="not a socket"):
        take_environment({"LISTEN_FDS": "1", "LISTEN_PID": "7"}, 7, first_fd=1_000_000)


def test_a_full_queue_at_systemd_blocks_nobody_and_readiness_can_be_said_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        with Notifier(str(tmp_path / "notify")) as notifier:
            while notifier.ready():
                pass
            systemd.recv(1000)
            assert notifier.ready()
