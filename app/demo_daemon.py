"""The demo's child processes: the daemon it serves a checkpoint with, and helpers that need model code.

Owned by `app.demo`. Every child is in a session of its own, so that Ctrl-C reaches only the demo, which stops
them in order; and each ends with the demo however that ends (parent-death signal).
"""

import base64
import http.client
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from app.schema import EncodeAnswer
from shm._core import set_parent_death_signal

LAST_LINES = 30


class DemoFailed(Exception):
    """A step did not do what it should; the message says which and gives the child's own last words."""


@contextmanager
def child(
    directory: Path,
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    output: int | IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module arguments`, terminated and waited for at the end.

    directory is where its libraries put their temporary files. output None: it shares ours.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=stdin,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(directory), **(environment or {})},
        start_new_session=True,
        preexec_fn=partial(set_parent_death_signal, signal.SIGTERM),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def run_module(directory: Path, module: str, *arguments: str) -> None:
    """Run a helper to its end; DemoFailed with its output if it does not succeed."""
    with child(directory, module, *arguments, output=subprocess.PIPE) as process:
        output, _ = process.communicate()
    if process.returncode != 0:
        raise DemoFailed(f"{module} failed:\n{_last_lines(output)}")


class DemoDaemon:
    """`encoderd serve` with one CPU worker on a free port, its sockets and log in `directory`."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._checkpoint = checkpoint
        self._directory = directory
        self._log_path = directory / "daemon.log"
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            self._notifications = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notify_path = str(self._directory / "notify.sock")
            self._notifications.bind(notify_path)
            log = resources.enter_context(self._log_path.open("wb"))
            self._process = resources.enter_context(
                child(
                    self._directory, "app", "serve", str(self._checkpoint),
                    "--port", str(self._port), "--device", "cpu",
                    "--attach-socket", str(self._directory / "attach.sock"),
                    "--segment-size", "256MiB", "--arena-size", "128MiB",
                    environment={"NOTIFY_SOCKET": notify_path}, output=log,
                )
            )  # fmt: skip
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def wait_until_ready(self, show_status: Callable[[str], None]) -> None:
        """As systemd would: pass the STATUS= texts on until READY=1; DemoFailed if it ends before."""
        with selectors.DefaultSelector() as selector, _pidfd(self._process.pid) as pidfd:
            selector.register(self._notifications, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            while True:
                if self._notifications not in [key.fileobj for key, _ in selector.select()]:
                    raise DemoFailed(f"the daemon did not start:\n{self._last_words()}")
                lines = self._notifications.recv(65536).decode().splitlines()
                if "READY=1" in lines:
                    return
                for line in lines:
                    if line.startswith("STATUS="):
                        show_status(line.removeprefix("STATUS="))

    def encode(self, picture: Path) -> EncodeAnswer:
        """Post the file's bytes; DemoFailed with the problem's text if the answer is not 200."""
        data_url = "data:image/jpeg;base64," + base64.b64encode(picture.read_bytes()).decode()
        body = json.dumps({"req_id": "demo", "modality": "image", "mm_items": [data_url]})
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/encode", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            raise DemoFailed(f"/encode answered {response.status}: {text.decode()}\n{self._last_words()}")
        return msgspec.json.decode(text, type=EncodeAnswer)

    def stop(self) -> None:
        """SIGTERM; DemoFailed unless it drains and exits with status 0."""
        self._process.terminate()
        status = self._process.wait()
        if status != 0:
            raise DemoFailed(f"the daemon ended with exit status {status}:\n{self._last_words()}")

    def _last_words(self) -> str:
        return _last_lines(self._log_path.read_bytes())


def _last_lines(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-LAST_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
