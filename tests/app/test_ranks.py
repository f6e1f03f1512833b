"""app.ranks: processes that live and die together."""

import os
import signal
import subprocess

from app.ranks import RankProcess, Ranks
from tests.app.support import on_loop


def start(*command: str) -> RankProcess:
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    return RankProcess(process, os.pidfd_open(process.pid))


def close_input(process: RankProcess) -> None:
    assert process.process.stdin is not None
    process.process.stdin.close()


@on_loop
async def test_one_death_ends_all_and_its_status_is_that_of_the_group() -> None:
    processes = [start("cat"), start("sh", "-c", "read line; exit 7"), start("cat")]
    ranks = Ranks(processes)
    assert ranks.pids == [process.process.pid for process in processes]
    assert ranks.first_dead == 0
    close_input(processes[1])  # its read ends
    assert await ranks.ended == 7
    assert ranks.first_dead == 1
    assert [process.process.poll() for process in processes] == [-signal.SIGKILL, 7, -signal.SIGKILL]
    for process in (processes[0], processes[2]):
        close_input(process)


@on_loop
async def test_a_signal_reaches_every_process_and_none_that_was_reaped() -> None:
    processes = [start("cat"), start("cat")]
    ranks = Ranks(processes)
    ranks.send_signal(signal.SIGKILL)
    assert await ranks.ended == -signal.SIGKILL
    ranks.send_signal(signal.SIGKILL)
    for process in processes:
        close_input(process)
