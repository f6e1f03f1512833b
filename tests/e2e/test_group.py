"""Tensor-parallel groups: several ranks that behave as one worker, also when one of them dies or hangs.

With the stub tower; test_group_towers.py has real ones.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from shm.client import connect
from tests.e2e.client import until
from tests.e2e.daemon import Daemon, open_pidfd, wait_end
from tests.e2e.load import Judge, Load
from tests.e2e.stub_items import check_rows, stub_item

CLIENTS = 4
KILLS = 12
DEATH_STATUSES = (503, 504)
DATA = ("--tp-size", "2", "--tp-mode", "data")
SMALL = ("--segment-size", "16MiB", "--arena-size", "96MiB")


@pytest.fixture(scope="module")
def groups() -> Iterator[Daemon]:
    """Two places of two ranks each, with the stub tower."""
    with Daemon(".", "--tower", "stub", *SMALL, *DATA, "--stall-timeout", "3") as daemon:
        yield daemon


def kill(pid: int) -> None:
    """kill -9, and the proof."""
    pidfd = open_pidfd(pid)
    assert pidfd is not None
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_end(pidfd)


def other_ranks(daemon: Daemon) -> list[int]:
    """Process ids of all ranks but those that the routes show, which are rank 0 of each place."""
    shown = {worker["pid"] for worker in daemon.http.workers()}
    return [pid for pid in daemon.worker_pids() if pid not in shown]


def wait_back(daemon: Daemon, victim: int) -> None:
    """Until the victim's group has been replaced, whole."""
    until(lambda: victim not in daemon.worker_pids(), "the dead rank is reaped")
    daemon.wait_all_ready()


def test_two_places_of_two_ranks_give_the_rows_of_one_process(groups: Daemon) -> None:
    assert len(groups.worker_pids()) == 4
    assert len(groups.http.workers()) == 2
    with connect(groups.attach_socket) as session, Load(groups.http, CLIENTS) as load:
        judge = Judge(session)
        for count in range(1, 17):
            load.post(*(stub_item(rows=1 + number % 5) for number in range(count)))
        for outcome in load.rest():
            assert judge.judge(outcome)


def test_an_item_that_breaks_another_ranks_forward_fails_alone(groups: Daemon) -> None:
    """Of four items that are prepared together two go to each rank, so both ranks meet one that breaks."""
    with connect(groups.attach_socket) as session, Load(groups.http, CLIENTS) as load:
        judge = Judge(session)
        bad = [tuple(stub_item(fault="error-in-forward") for _ in range(4)) for _ in range(4)]
        for items in bad:
            load.post(*items)
            load.post(*(stub_item(rows=7) for _ in range(4)))
        for outcome in load.rest():
            assert judge.judge(outcome, 500, 502, 503) == (outcome.items not in bad)


def test_a_killed_rank_takes_its_group_along_and_the_group_comes_back(groups: Daemon) -> None:
    before = sorted(groups.worker_pids())
    victim = other_ranks(groups)[0]
    kill(victim)
    wait_back(groups, victim)
    after = groups.worker_pids()
    assert len(after) == 4
    assert len(set(after) & set(before)) == 2, "the other place was left alone"
    assert any(worker["reason"] == "rank 1 killed by SIGKILL" for worker in groups.http.workers())
    items = [stub_item(rows=3) for _ in range(6)]
    with connect(groups.attach_socket) as session:
        check_rows(session, groups.http.encode(items).handle, *items)


def test_kills_of_any_rank_under_load_lose_and_corrupt_nothing(groups: Daemon) -> None:
    choice = random.Random(5)
    kills = victim = 0
    with connect(groups.attach_socket) as session, Load(groups.http, CLIENTS) as load:
        judge = Judge(session)
        for _ in range(CLIENTS):
            load.post(stub_item(forward_ms=30), stub_item(rows=3), stub_item(), stub_item(rows=2))
        for outcome in load.rest():
            judge.judge(outcome, *DEATH_STATUSES)
            if kills == KILLS:
                continue
            pids = groups.worker_pids()
            if len(pids) == 4 and victim not in pids and groups.http.all_ready():
                victim = choice.choice(pids)
                kill(victim)
                kills += 1
            load.post(stub_item(forward_ms=30), stub_item(rows=3), stub_item(), stub_item(rows=2))
        assert judge.right > KILLS
    wait_back(groups, victim)
    assert groups.http.arena_is_free()


def test_a_rank_that_stops_is_ended_with_its_group_by_the_stall_limit(groups: Daemon) -> None:
    stopped = [(pid, open_pidfd(pid)) for pid in other_ranks(groups)]
    for _, pidfd in stopped:
        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    with connect(groups.attach_socket) as session, Load(groups.http, CLIENTS) as load:
        judge = Judge(session)
        for _ in range(CLIENTS):
            load.post(*(stub_item(rows=2) for _ in range(8)))
        for outcome in load.rest():
            judge.judge(outcome, *DEATH_STATUSES)
    # Each place whose stopped rank was given an item is replaced; at least one was.
    ended = [pid for pid, _ in stopped if pid not in groups.worker_pids()]
    assert ended
    for pid, pidfd in stopped:
        assert pidfd is not None
        if pid not in ended:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        else:
            wait_back(groups, pid)
