"""A machine with a real systemd for tests: booted in namespaces on this one, gone when the test ends.

`Machine` is a context manager; tests lay files over its root directory before it boots and run commands in
it afterwards. Nothing is polled: systemd says itself when it has booted, and journal lines are awaited.
"""

import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BOOT_SCRIPT = Path(__file__).with_name("boot.sh")
NAMESPACES = ["--mount", "--pid", "--uts", "--ipc", "--cgroup", "--net"]
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Machine:
    """seed: the directory whose files are laid over the root. binds: directory here -> directory inside."""

    def __init__(self, seed: Path, binds: Mapping[Path, str], *, target: str = "basic.target") -> None:
        self._seed = seed
        self._binds = binds
        self._target = target
        self._resources = ExitStack()
        self.pid = 0  # of its systemd, as seen from here

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            work = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="encoderd-boot-")))
            (work / "seed").symlink_to(self._seed)
            (work / "binds").write_text("".join(f"{here} {inside}\n" for here, inside in self._binds.items()))
            group = resources.enter_context(_control_group())
            # Open only until READY=1: systemd goes on to send, and would block on a queue nobody reads.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
                ready.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                ready.bind(str(work / "ready.sock"))
                command = [str(BOOT_SCRIPT), str(work), self._target]
                boot = resources.enter_context(_process_in(group, command))
                self.pid = _wait_until_booted(ready, boot)
            resources.callback(_kill_and_wait, self.pid, boot)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._resources.close()

    def path(self, inside: str) -> str:
        """A path inside, as seen from here: files and Unix sockets."""
        return f"/proc/{self.pid}/root{inside}"

    def command(self, *words: str) -> list[str]:
        """The command line that runs words inside."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--root", "--wd", *words]

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command inside and give its output; with check its failure is an error that shows it."""
        done = subprocess.run(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def journal_position(self) -> str:
        """Where the journal ends now, with everything said so far before it."""
        self.run("journalctl", "--sync")
        *_, last = self.run("journalctl", "--lines=0", "--show-cursor").splitlines()
        return last.removeprefix("-- cursor: ")

    @contextmanager
    def journal(self, unit: str, position: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The journal's entries about a unit from a position on, without an end: the next is waited for."""
        follow = self.command(
            "journalctl", "--follow", "--output=json", f"--unit={unit}", f"--after-cursor={position}"
        )
        with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as journal:
            assert journal.stdout is not None
            try:
                yield map(json.loads, journal.stdout)
            finally:
                journal.kill()


def _wait_until_booted(ready: socket.socket, boot: subprocess.Popen[str]) -> int:
    """The pid of systemd, from the sender's credentials of its READY=1."""
    pidfd = os.pidfd_open(boot.pid)
    try:
        poll = select.poll()
        poll.register(ready, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while True:
            if ready.fileno() not in dict(poll.poll()):
                raise AssertionError(f"the machine did not boot:\n{boot.communicate()[0]}")
            message, ancillary, _, _ = ready.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
            if b"READY=1" in message.split(b"\n"):
                return int(CREDENTIALS.unpack(ancillary[0][2][: CREDENTIALS.size])[0])
    finally:
        os.close(pidfd)


def _kill_and_wait(pid: int, boot: subprocess.Popen[str]) -> None:
    """End PID 1 of the namespace, and so every process in it; unshare ends when the last one has."""
    os.kill(pid, signal.SIGKILL)
    boot.wait()


@contextmanager
def _process_in(group: Path, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command in new namespaces and in a control group of its own; it dies with us."""
    enter_group = f'echo $$ >"{group}/cgroup.procs" && exec "$@"'
    unshare = ["setpriv", "--pdeathsig=KILL", "unshare", *NAMESPACES, "--fork", "--kill-child"]
    with subprocess.Popen(
        ["sh", "-c", enter_group, "sh", *unshare, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _control_group() -> Iterator[Path]:
    """A fresh group in this machine's cgroup2 tree, removed with all that systemd makes in it."""
    group = Path(tempfile.mkdtemp(prefix="encoderd-boot-", dir=_cgroup2_mount()))
    try:
        yield group
    finally:
        _wait_until_empty(group)
        for directory, _, _ in os.walk(group, topdown=False):
            os.rmdir(directory)


def _wait_until_empty(group: Path) -> None:
    """The kernel takes a dead process out of its group a moment after its parent has seen its end."""
    with (group / "cgroup.events").open() as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while "populated 1" in events.read():
            poll.poll()
            events.seek(0)


def _cgroup2_mount() -> str:
    with open("/proc/self/mounts") as mounts:
        return next(fields[1] for fields in map(str.split, mounts) if fields[2] == "cgroup2")


def copy_package(source: Path, target: Path) -> None:
    """Copy a package's code, readable for everyone whatever the checkout's modes are."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    subprocess.run(["chmod", "-R", "a+rX", target], check=True)
