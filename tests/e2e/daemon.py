"""One real daemon under test: `python -m app serve ...` as a child process, and all that it may leave behind.

Used by the fixtures in conftest and by tests.bench.control_plane. Readiness is an event: the daemon sends
READY=1 to the NOTIFY_SOCKET that is bound here, and a daemon that dies first is seen through its pidfd.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.e2e.client import Http, until
from tests.shared_memory import names_that_stay, shared_memory_names

REPOSITORY = Path(__file__).resolve().parents[2]
HANG_GUARD_S = 120.0  # only so that a hang becomes a failure; nothing is asserted about durations
MARK = "ENCODERD_TEST_MARK"


class Daemon:
    """A running daemon with its sockets in a directory of its own. Context manager: leaves by stop()."""

    def __init__(
        self, checkpoint: str, *options: str, workers: int = 2, directory: Path | None = None
    ) -> None:
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="encoderd-e2e-"))
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.http_socket = str(self.directory / "http.sock")
        self.attach_socket = str(self.directory / "attach.sock")
        self.log_path = self.directory / "log"
        self.started_ns = 0
        self._mark = uuid.uuid4().hex
        self._shared_memory_before = shared_memory_names()
        self._notified: list[str] = []
        self._closed = False
        self._terminated = False
        self._stack = contextlib.ExitStack()
        self._notify = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notify_path = self.directory / "notify.sock"
        notify_path.unlink(missing_ok=True)
        self._notify.bind(str(notify_path))
        self._arguments = [
            sys.executable, "-m", "app", "serve", checkpoint,
            "--host", "127.0.0.1", "--port", str(self.port), "--uds", self.http_socket,
            "--attach-socket", self.attach_socket, "--workers", str(workers),
            *options,
        ]  # fmt: skip
        self.process = self._spawn(str(notify_path))
        self._pidfd = os.pidfd_open(self.process.pid)
        self._stack.callback(os.close, self._pidfd)

    def _spawn(self, notify_path: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "NOTIFY_SOCKET": notify_path, MARK: self._mark, "HF_HUB_OFFLINE": "1"}
        environment.pop("LISTEN_FDS", None)
        environment.pop("WATCHDOG_USEC", None)
        self.started_ns = time.monotonic_ns()
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._arguments,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which stops us in order
            )

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.discard()  # the test's own failure is the one to see
        elif not self._closed:
            self.stop()

    # --- talking to it ---
    @property
    def http(self) -> Http:
        """HTTP over the Unix socket, as a prefill on the same host would do."""
        return Http(f"unix:{self.http_socket}")

    @property
    def tcp(self) -> Http:
        """HTTP over TCP."""
        return Http(f"127.0.0.1:{self.port}")

    def log(self) -> str:
        """All that the daemon and its workers have written so far."""
        return self.log_path.read_text(errors="replace")

    def wait_notified(self, line: str) -> None:
        """Block until the daemon has sent this line to its NOTIFY_SOCKET; fail at once if it dies first."""
        guard = time.monotonic() + HANG_GUARD_S
        while line not in self._notified:
            remaining = max(0.0, guard - time.monotonic())
            readable, _, _ = select.select([self._notify.fileno(), self._pidfd], [], [], remaining)
            if self._notify.fileno() in readable:
                self._notified += self._notify.recv(65536).decode().splitlines()
            elif self._pidfd in readable:
                raise AssertionError(
                    f"the daemon ended with {self.process.wait()} before {line}\n{self.tail()}"
                )
            else:
                raise AssertionError(f"no {line} within the hang guard\n{self.tail()}")

    def wait_ready(self) -> None:
        """READY=1 says that one worker is ready; then until all are."""
        self.wait_notified("READY=1")
        self.wait_all_ready()

    def wait_all_ready(self) -> None:
        """Until every place has a ready worker.

        Between two questions this waits for the daemon's end: the cores are left to the workers that load.
        """

        def holds() -> bool:
            ended, _, _ = select.select([self._pidfd], [], [], 0.02)
            assert not ended, f"the daemon ended with {self.process.wait()}\n{self.tail()}"
            return self.http.all_ready()

        until(holds, "all workers ready")

    def tail(self) -> str:
        """The end of the log, for failure messages."""
        return "\n".join(self.log().splitlines()[-40:])

    def worker_pids(self) -> list[int]:
        """The daemon's children that are encoding workers, as the kernel lists them."""
        return [pid for pid in child_pids(self.process.pid) if b"gpu_workers" in command_line(pid)]

    def resident_bytes(self) -> dict[str, int]:
        """The control process's resident memory by kind: RssAnon, RssFile, RssShmem (mapped regions)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines if line.startswith("Rss"))
        return {name: int(value.split()[0]) * 1024 for name, value in pairs}

    # --- ending it ---
    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, without waiting. A second time means at once."""
        self._terminated = True
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, unless it had one; then exit status 0, no child, no socket file, no shared memory."""
        try:
            if self.process.poll() is None and not self._terminated:
                self.terminate()
            code = self._wait_exit()
            assert code == 0, f"exit status {code} on SIGTERM\n{self.tail()}"
            self.check_nothing_left()
            for path in (self.http_socket, self.attach_socket):
                assert not os.path.lexists(path), f"{path} is still there"
        finally:
            self.discard()

    def kill(self) -> None:
        """SIGKILL the control process and wait for its end; the directory and its files stay."""
        self.process.kill()
        self._wait_exit()

    def _wait_exit(self) -> int:
        try:
            return self.process.wait(timeout=HANG_GUARD_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon does not end\n{self.tail()}") from None

    def check_nothing_left(self) -> None:
        """Every process that this daemon started has ended and /dev/shm is as before it."""
        with contextlib.ExitStack() as stack:
            for pid in marked_pids(self._mark):
                descriptor = open_pidfd(pid)
                if descriptor is None:
                    continue
                stack.callback(os.close, descriptor)
                ended, _, _ = select.select([descriptor], [], [], HANG_GUARD_S)
                assert ended, f"process {pid} outlived the daemon: {command_line(pid)!r}"
        left = names_that_stay(self._shared_memory_before)
        assert not left, f"left in /dev/shm: {left}"

    def discard(self) -> None:
        """Whatever state it is in: no process and no directory afterwards, and no more checks."""
        self._closed = True
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stack.close()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child_pids(pid: int) -> list[int]:
    """Direct children of every thread of pid."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(word) for word in (task / "children").read_text().split()]
    return children


def command_line(pid: int) -> bytes:
    """/proc/pid/cmdline, empty if the process has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def marked_pids(mark: str) -> Iterator[int]:
    """Every process whose environment carries this mark: the daemon's descendants, orphans included."""
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def open_pidfd(pid: int) -> int | None:
    """A pidfd, or None if the process has gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_end(pidfd: int) -> None:
    """Block until the process behind pidfd has ended; the descriptor is closed."""
    try:
        assert select.select([pidfd], [], [], HANG_GUARD_S)[0], "the process does not end"
    finally:
        os.close(pidfd)
