"""Second processes for the tests of the extension: forked, so that they share the test's mappings."""

import mmap
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shm._core import CONSUMER_SIDE_BYTES, PRODUCER_SIDE_OVERHEAD_BYTES, SLOT_BYTES, Consumer, Producer

A_LONG_TIME_NS = 60_000_000_000  # a wait that runs into this has lost its wake-up


@dataclass
class Child:
    """A forked process. `exit_code` (negative: the signal) once it was waited for."""

    pid: int
    exit_code: int | None = None

    def wait(self) -> int:
        """Until it ends; its exit code, 0 if its function returned."""
        if self.exit_code is None:
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_code

    def kill(self) -> None:
        """SIGKILL, and wait."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def forked(function: Callable[[], object]) -> Iterator[Child]:
    """Runs function in a child; kills it on the way out if it still runs."""
    pid = os.fork()
    if pid == 0:
        _run_and_exit(function)
    child = Child(pid)
    try:
        yield child
    finally:
        if child.exit_code is None:
            child.kill()


def _run_and_exit(function: Callable[[], object]) -> None:
    code = 1
    try:
        function()
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process: nothing may return into the test runner
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class RingMemory:
    """An anonymous shared mapping that holds one ring: consumer side at 0, producer side behind it."""

    slot_count: int
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(
            -1, self.producer_offset + PRODUCER_SIDE_OVERHEAD_BYTES + self.slot_count * SLOT_BYTES
        )

    @property
    def producer_offset(self) -> int:
        return CONSUMER_SIDE_BYTES

    @property
    def armed(self) -> int:
        return int.from_bytes(self.memory[128:132], "little")

    def producer(self, eventfd: int = -1) -> Producer:
        return Producer(self.memory, self.producer_offset, self.memory, 0, self.slot_count, eventfd)

    def consumer(self) -> Consumer:
        return Consumer(self.memory, self.producer_offset, self.memory, 0, self.slot_count)

    def wait_until_armed(self) -> None:
        """Until the consumer sleeps, or is about to."""
        while self.armed != 1:
            os.sched_yield()
