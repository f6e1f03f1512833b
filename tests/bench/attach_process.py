"""AttachServer: starts tests.bench.attach_server and gives it commands, for tests and benchmarks."""

import contextlib
import subprocess
import sys
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from shm.messages import Handle
from tests.bench.attach_server import AwaitLeases, Command, Fill, Grant

Answer = TypeVar("Answer")


class AttachServer:
    """The server's process, from `with` to its end. Each command waits for its answer."""

    def __init__(self, path: str, segment_bytes: int = 8 << 20, backing: str = "posix") -> None:
        self.path = path
        argv = [sys.executable, "-m", "tests.bench.attach_server", path, str(segment_bytes), backing]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read(str)

    def fill(
        self, rows: int = 4, dim: int = 8, dtype: str = "float32", seed: int = 1, publish: int = 0
    ) -> Handle:
        """A block that is being filled, `publish` rows of it published already."""
        return self.tell(Fill(rows, dim, dtype, seed, publish), Handle)

    def grant(self, handle: Handle, count: int) -> list[Handle]:
        """More handles for the same block."""
        return self.tell(Grant(handle, count), list[Handle])

    def await_leases(self, count: int) -> None:
        """Until the server counts so many attached leases."""
        self.tell(AwaitLeases(count), int)

    def tell(self, command: Command, answer: type[Answer]) -> Answer:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        self.process.stdin.flush()
        return self._read(answer)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def _read(self, answer: type[Answer]) -> Answer:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=answer)
