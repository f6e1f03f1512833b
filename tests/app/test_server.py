"""app.server: sockets before workers, small and quick, and out again in order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.config import EXIT_CONFIG, ServeConfig
from app.errors import ConfigError
from app.notify import Systemd
from app.server import longest_stop_s, open_sockets, run
from tests.app.conftest import STUB_OPTIONS
from tests.app.serving import config
from tests.e2e.client import Http
from tests.e2e.daemon import Daemon

NO_SYSTEMD = Systemd("", 0.0, (), None)


def test_port_0_is_replaced_by_what_was_bound(tmp_path: Path) -> None:
    wanted = config(port=0, uds=str(tmp_path / "http.sock"))
    with open_sockets(wanted, NO_SYSTEMD) as (sockets, bound):
        assert bound.port == sockets[0].getsockname()[1] != 0
        assert bound.uds == str(tmp_path / "http.sock")
    assert not os.path.lexists(bound.uds)


def test_inherited_sockets_come_first_and_are_not_removed(tmp_path: Path) -> None:
    http, attach = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one, name in ((http, "http"), (attach, "attach")):
        one.bind(str(tmp_path / name))
        one.listen()
    with open_sockets(config(), Systemd("", 0.0, (http,), attach)) as (sockets, bound):
        assert sockets == [http]
        assert bound.uds == str(tmp_path / "http")
        assert bound.attach_socket == str(tmp_path / "attach")
        assert os.fstat(bound.attach_fd)
        os.close(bound.attach_fd)
    assert (tmp_path / "http").is_socket()


def test_a_watchdog_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"WatchdogSec \(1.5 s\)"):
        run(config(), Systemd("", 1.5, (), None))


def test_the_stop_at_its_longest_fits_the_unit_unless_the_drain_is_made_longer() -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "encoderd.service").read_text()
    [limit_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert longest_stop_s(ServeConfig(checkpoint="")) <= float(limit_s)
    longer = ServeConfig(checkpoint="", shutdown_delay_s=5.0, shutdown_timeout_s=100.0)
    assert longest_stop_s(longer) > 105.0


def test_the_control_plane_is_small(stub_daemon: Daemon) -> None:
    assert stub_daemon.http.encode(b"stub").status == 200
    assert sum(stub_daemon.resident_bytes().values()) < 60 << 20


def test_a_taken_port_ends_the_start_with_78(stub_daemon: Daemon) -> None:
    command = [sys.executable, "-m", "app", "serve", "x", *STUB_OPTIONS, "--port", str(stub_daemon.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_CONFIG
    assert str(stub_daemon.port) in done.stderr
    assert "Traceback" not in done.stderr


def test_probes_answer_while_nothing_is_ready_and_encode_says_503() -> None:
    """A stopped worker never becomes ready; the daemon serves all the same."""
    daemon = Daemon(".", *STUB_OPTIONS, workers=1)
    try:
        http = Http(f"unix:{daemon.http_socket}")
        daemon.wait_notified("STATUS=worker 0 starting")
        for pid in daemon.worker_pids():
            os.kill(pid, signal.SIGSTOP)
        assert http.get("/livez").status == 200
        assert http.get("/readyz").status in (200, 503)
        if http.get("/readyz").status == 503:
            http.encode(b"stub").check_problem(503)
        for pid in daemon.worker_pids():
            os.kill(pid, signal.SIGCONT)
        daemon.wait_ready()
        daemon.stop()
    finally:
        daemon.discard()


def test_the_unix_socket_goes_with_the_daemon() -> None:
    with Daemon(".", *STUB_OPTIONS, workers=1) as daemon:
        assert os.path.lexists(daemon.http_socket)
        daemon.terminate()
        assert daemon.process.wait() == 0
        assert not os.path.lexists(daemon.http_socket)
