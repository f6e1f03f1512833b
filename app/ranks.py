"""The processes of one worker: one, or the ranks of a tensor-parallel group, which live and die together.

Called by `app.worker`. One rank's death kills the others at once; the group has ended when every one of them
has been reaped, because until then some rank could still write to the segment.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple


class RankProcess(NamedTuple):
    """A started process and its pidfd, which Ranks closes."""

    process: subprocess.Popen[bytes]
    pidfd: int


class Ranks:
    """All processes of a launch, in order of rank.

    ended resolves once every one has been reaped, with the exit status (negative: the signal) of the one that
    died first, whose number is first_dead.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._processes = processes
        self._loop = asyncio.get_running_loop()
        self._statuses: dict[int, int] = {}  # by rank, in order of death
        self.ended: asyncio.Future[int] = self._loop.create_future()
        for rank, process in enumerate(processes):
            self._loop.add_reader(process.pidfd, self._reap, rank)

    @property
    def pids(self) -> list[int]:
        """Process ids; reused by the kernel once `ended` is done."""
        return [process.process.pid for process in self._processes]

    @property
    def first_dead(self) -> int:
        """The rank whose death ended the group; 0 while all live."""
        return next(iter(self._statuses), 0)

    def send_signal(self, number: signal.Signals) -> None:
        """To every process that has not been reaped."""
        for rank, process in enumerate(self._processes):
            if rank not in self._statuses:
                signal.pidfd_send_signal(process.pidfd, number)

    def _reap(self, rank: int) -> None:
        process, pidfd = self._processes[rank]
        status = process.poll()
        if status is None:
            return
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._statuses[rank] = status
        if len(self._statuses) == len(self._processes):
            self.ended.set_result(self._statuses[self.first_dead])
        elif len(self._statuses) == 1:
            self.send_signal(signal.SIGKILL)
