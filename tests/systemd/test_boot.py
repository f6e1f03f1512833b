"""The service under a real systemd: the units as they are installed, the daemon with its test tower."""

import base64
import http.client
import json
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_workers.families.stub import stub_rows
from shm.client import connect
from tests import needs
from tests.systemd.machine import Machine, copy_package

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "shm", "gpu_workers")
HTTP_SOCKET = "/run/encoderd/http.sock"
ATTACH_SOCKET = "/run/encoderd/attach.sock"
SERVICE = "encoderd.service"
UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"  # systemd's message id; sd-messages.h
UNIT_FAILED = "be02cf6855d2428ba40df7e9d022f03d"
ITEM = b"stub rows=24"

# Where the interpreter and its packages appear inside: paths that ProtectHome= and PrivateTmp= leave alone.
PREFIX_INSIDE = "/opt/encoderd/python"
PYTHON_INSIDE = f"{PREFIX_INSIDE}/bin/{Path(sys.executable).resolve().name}"
SITE_INSIDE = "/opt/encoderd/site-packages"
COMMAND = f"""\
#!/bin/sh
export LD_LIBRARY_PATH={PREFIX_INSIDE}/lib PYTHONPATH=/opt/encoderd/lib:{SITE_INSIDE}
exec {PYTHON_INSIDE} -m app "$@"
"""
ENVIRONMENT = """\
ENCODERD_CHECKPOINT=/var/lib/encoderd/checkpoint
ENCODERD_OPTIONS=--tower stub --workers 1 --segment-size 64MiB --arena-size 128MiB
"""
# Long enough for a busy machine, short enough to wait for.
SHORT_WATCHDOG = "[Service]\nWatchdogSec=5\n"

pytestmark = [
    needs.namespaces(),
    needs.program("/lib/systemd/systemd", package="systemd"),
    needs.program("unshare", package="util-linux"),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A booted machine with encoderd installed as systemd/README.md says, nothing started."""
    seed = tmp_path_factory.mktemp("seed")
    _lay_files(seed)
    binds = {Path(sys.base_prefix): PREFIX_INSIDE, Path(sysconfig.get_path("platlib")): SITE_INSIDE}
    with Machine(seed, binds) as machine:
        machine.run("systemd-sysusers", "encoderd.conf")
        machine.run("systemd-tmpfiles", "--create", "encoderd.conf")
        machine.run("systemctl", "start", "encoderd.socket")
        yield machine


def _lay_files(seed: Path) -> None:
    for package in PACKAGES:
        copy_package(ROOT / package, seed / "opt/encoderd/lib" / package)
    texts = {
        "opt/encoderd/bin/encoderd": COMMAND,
        "etc/encoderd/encoderd.env": ENVIRONMENT,
        f"etc/systemd/system/{SERVICE}.d/test.conf": SHORT_WATCHDOG,
        f"etc/systemd/system/{SERVICE}": (ROOT / "systemd" / SERVICE).read_text(),
        "etc/systemd/system/encoderd.socket": (ROOT / "systemd/encoderd.socket").read_text(),
        "usr/lib/sysusers.d/encoderd.conf": (ROOT / "systemd/encoderd.sysusers").read_text(),
        "usr/lib/tmpfiles.d/encoderd.conf": (ROOT / "systemd/encoderd.tmpfiles").read_text(),
    }
    for name, text in texts.items():
        path = seed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    for directory in (seed, *(path for path in seed.rglob("*") if path.is_dir())):
        directory.chmod(0o755)


@pytest.fixture
def stopped(machine: Machine) -> Machine:
    """The socket listens, the service does not run and has no past."""
    machine.run("systemctl", "stop", SERVICE)
    machine.run("systemctl", "reset-failed", SERVICE)
    machine.run("systemctl", "start", "encoderd.socket")
    return machine


@pytest.fixture
def started(stopped: Machine) -> Machine:
    stopped.run("systemctl", "start", SERVICE)
    return stopped


def test_a_connection_to_the_socket_starts_the_service(stopped: Machine) -> None:
    assert stopped.show(SERVICE, "ActiveState") == "inactive"
    status, _ = _request(stopped, "GET", "/livez")
    assert status == 200
    # Activation was asked for by the connection; this only waits for its READY=1.
    stopped.run("systemctl", "start", SERVICE)
    assert stopped.show(SERVICE, "ActiveState") == "active"
    assert _encode(stopped)["modality"] == "image"


def test_start_returns_when_the_daemon_is_ready(started: Machine) -> None:
    # No waiting in between: READY=1 is only sent when every worker is ready.
    assert _request(started, "GET", "/readyz")[0] == 200


def test_the_inherited_tcp_socket_serves_too(started: Machine) -> None:
    get = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:30300/livez').status)"
    assert started.run(PYTHON_INSIDE, "-c", get).strip() == "200"


def test_a_client_attaches_through_the_inherited_socket(started: Machine) -> None:
    answer = _encode(started)
    with connect(started.path(ATTACH_SOCKET)) as session, session.attach(answer["handle"]) as view:
        np.testing.assert_array_equal(view.numpy(), stub_rows(ITEM))


def test_the_service_runs_as_its_own_user_without_capabilities(started: Machine) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{_main_pid(started)}/status").read_text().splitlines()
        if ":\t" in line
    )
    user = started.run("id", "--user", "encoderd").strip()
    assert status["Uid"].split() == [user] * 4
    assert status["CapEff"] == "0000000000000000"
    assert status["NoNewPrivs"] == "1"


def test_the_watchdog_replaces_a_daemon_that_hangs(started: Machine) -> None:
    main = _main_pid(started)
    position = started.journal_position()
    os.kill(main, signal.SIGSTOP)
    _wait_until_restarted(started, position)
    assert started.show(SERVICE, "NRestarts") == "1"
    assert _main_pid(started) != main
    assert _encode(started)["modality"] == "image"


def test_a_killed_daemon_is_replaced_and_no_caller_is_refused(started: Machine) -> None:
    position = started.journal_position()
    os.kill(_main_pid(started), signal.SIGKILL)
    status, _ = _request(started, "GET", "/livez")  # waits in the backlog that systemd keeps
    assert status == 200
    _wait_until_restarted(started, position)
    assert started.show(SERVICE, "NRestarts") == "1"


def test_a_wrong_configuration_is_not_tried_again(stopped: Machine) -> None:
    override = Path(stopped.path(f"/etc/systemd/system/{SERVICE}.d/wrong.conf"))
    override.write_text('[Service]\nEnvironment="ENCODERD_OPTIONS="\nEnvironmentFile=\n')
    stopped.run("systemctl", "daemon-reload")
    try:
        stopped.run("systemctl", "start", SERVICE, check=False)
        assert stopped.show(SERVICE, "ExecMainStatus") == "78"
        assert stopped.show(SERVICE, "ActiveState") == "failed"
        assert stopped.show(SERVICE, "NRestarts") == "0"
    finally:
        override.unlink()
        stopped.run("systemctl", "daemon-reload")


def test_stop_leaves_nothing_but_the_sockets(started: Machine) -> None:
    _encode(started)
    group = started.path("/sys/fs/cgroup" + started.show(SERVICE, "ControlGroup"))
    started.run("systemctl", "stop", SERVICE)
    assert started.show(SERVICE, "Result") == "success"
    assert not Path(group).exists()
    assert os.listdir(started.path("/dev/shm")) == []
    assert sorted(os.listdir(started.path("/run/encoderd"))) == ["attach.sock", "http.sock"]


def _main_pid(machine: Machine) -> int:
    """The daemon's pid as seen from here, from the pid that systemd shows inside."""
    inside = machine.show(SERVICE, "MainPID")
    group = machine.path("/sys/fs/cgroup" + machine.show(SERVICE, "ControlGroup") + "/cgroup.procs")
    for pid in map(int, Path(group).read_text().split()):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == inside:
            return pid
    raise AssertionError(f"no process {inside} in {group}")


def _wait_until_restarted(machine: Machine, position: str) -> None:
    with machine.journal(SERVICE, position) as entries:
        for entry in entries:
            assert entry.get("MESSAGE_ID") != UNIT_FAILED, machine.run("journalctl", f"--unit={SERVICE}")
            if entry.get("MESSAGE_ID") == UNIT_STARTED:
                return


def _encode(machine: Machine) -> dict[str, Any]:
    """Post one item of the test tower; the answer of a daemon that is ready."""
    data = "data:application/octet-stream;base64," + base64.b64encode(ITEM).decode()
    body = {"req_id": f"boot-{os.urandom(4).hex()}", "mm_items": [data], "modality": "image"}
    status, text = _request(machine, "POST", "/encode", body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def _request(machine: Machine, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """One request over the Unix socket, waiting for its answer however long the start takes."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.connect(machine.path(HTTP_SOCKET))
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
