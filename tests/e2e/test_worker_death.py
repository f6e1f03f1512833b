"""Workers that die or stop at every point: no request is lost, doubled or wrong, and every page comes back.

Kills are triggered by completed answers, never by a clock.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shm.client import Session, connect
from tests.e2e.client import until
from tests.e2e.conftest import STUB
from tests.e2e.daemon import Daemon, open_pidfd, wait_end
from tests.e2e.load import Judge, Load, Outcome
from tests.e2e.pictures import picture_bytes
from tests.e2e.raw_session import RawSession, wait_all_free
from tests.e2e.stub_items import check_rows, expected_rows, stub_item

CLIENTS = 6
DEATH_STATUSES = (503, 504)  # typed errors that a worker's death may end in
STORM_STATUSES = (422, *DEATH_STATUSES)  # a kill may hit the very request that is tried alone after another


class Killer:
    """kill -9 of a random worker, but only while all are ready: then a retry has somewhere to go."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._random = random.Random(seed)
        self._answers_to_wait = 1
        self._victim = 0
        self.kills = 0

    def on_answer(self) -> None:
        """A request has just been answered."""
        self._answers_to_wait -= 1
        if self._answers_to_wait > 0:
            return
        workers = self._daemon.http.workers()
        if all(worker["state"] == "ready" and worker["pid"] != self._victim for worker in workers):
            self._kill(self._random.choice(workers)["pid"])
            self._answers_to_wait = self._random.randint(1, 12)

    def _kill(self, pid: int) -> None:
        pidfd = open_pidfd(pid)
        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_end(pidfd)  # it is dead; that the daemon knows is seen by another pid in its place
        self._victim = pid
        self.kills += 1


def storm(daemon: Daemon, kills: int, post: Callable[[Load], None], judge: Callable[[Outcome], bool]) -> None:
    """Keep CLIENTS requests in flight until so many workers were killed; then wait for the last answers."""
    killer = Killer(daemon, seed=kills)
    with Load(daemon.http, threads=CLIENTS) as load:
        for _ in range(CLIENTS):
            post(load)
        for outcome in load.rest():
            judge(outcome)
            if killer.kills < kills:
                killer.on_answer()
                post(load)
    assert killer.kills == kills


@pytest.fixture
def small() -> Iterator[Daemon]:
    """Segments of 8 MiB: 200 replaced workers need 200 new ones."""
    with Daemon(".", "--tower", "stub", "--segment-size", "8MiB", "--arena-size", "96MiB") as daemon:
        yield daemon


def test_two_hundred_kills_under_load_lose_double_and_corrupt_nothing(small: Daemon) -> None:
    with connect(small.attach_socket) as session:
        judge = Judge(session)
        storm(
            small,
            200,
            lambda load: load.post(stub_item(forward_ms=30), stub_item(rows=3)),
            lambda outcome: judge.judge(outcome, *STORM_STATUSES),
        )
        assert judge.right > 200
        print(f"{judge.right} right, refused {judge.refused}")
    wait_all_free(small.attach_socket)
    small.wait_all_ready()
    with RawSession(small.attach_socket) as eyes:
        assert len(eyes.segments) == 2, "segments of dead workers stay"
    assert small.http.arena_is_free()


REAL_KILLS = {"one": 1, "both at once": 2, "both at once again": 2}  # five in all


@pytest.mark.parametrize("which", REAL_KILLS)
def test_kills_of_real_towers_under_load_corrupt_nothing(
    qwen: Daemon, qwen_session: Session, which: str
) -> None:
    """Requests in flight are retried: on the other worker, or on the next one that is ready."""
    victims = REAL_KILLS[which]
    # Each picture once in all three runs: content that two workers died of, alone, would be refused.
    first_seed = 1000 * list(REAL_KILLS).index(which)
    files = [picture_bytes(84 + 28 * (n % 6), 84, seed=first_seed + n) for n in range(CLIENTS + 20)]
    alone = {}
    for data in files:
        with qwen_session.attach(qwen.http.encode(data).handle) as view:
            alone[data] = view.numpy().copy()
    pids = set(qwen.worker_pids())
    answered = 0
    with Load(qwen.http, threads=CLIENTS) as load:
        for number in range(CLIENTS):
            load.post(files[number])
        for outcome in load.rest():
            assert outcome.answer is not None, f"lost: {outcome.lost!r}"
            if outcome.answer.status == 200:
                with qwen_session.attach(outcome.answer.handle) as view:
                    assert np.allclose(view.numpy(), alone[outcome.items[0]], rtol=1e-4, atol=1e-5)
            else:
                outcome.answer.check_problem(*STORM_STATUSES, req_id=outcome.req_id)
            answered += 1
            if answered < 20:
                load.post(files[CLIENTS + answered])
            elif answered == 20:
                for pid in list(pids)[:victims]:
                    os.kill(pid, signal.SIGKILL)
    qwen.wait_all_ready()
    assert len(pids.difference(qwen.worker_pids())) == victims
    wait_all_free(qwen.attach_socket)
    assert qwen.http.arena_is_free()


@pytest.fixture
def fragile() -> Iterator[Daemon]:
    """Two stub workers with a short stall limit, this test's own: deaths here touch no other test."""
    with Daemon(".", *STUB, "--stall-timeout", "2") as daemon:
        yield daemon


@pytest.mark.parametrize(
    "fault", ["exit-on-take", "exit-before-shape", "exit-in-forward", "exit-before-ready"]
)
def test_what_kills_its_workers_is_refused_and_every_neighbour_is_answered(
    fragile: Daemon, fault: str
) -> None:
    """The item kills the workers that try it until it was alone; its neighbours are retried and come out
    right."""
    poison = stub_item(fault=fault)
    with connect(fragile.attach_socket) as session:
        judge = Judge(session)
        with Load(fragile.http, threads=6) as load:
            for _ in range(5):
                load.post(stub_item(forward_ms=20))
            load.post(poison, req_id="poison")
            for outcome in load.rest():
                assert outcome.answer is not None, outcome.lost
                if outcome.req_id == "poison":
                    assert outcome.answer.check_problem(422, req_id="poison")["code"] == "poison_input"
                else:
                    assert judge.judge(outcome)
        fragile.wait_all_ready()
        fragile.http.encode(poison).check_problem(422)
        with Load(fragile.http, threads=6) as load:
            for _ in range(6):
                load.post(stub_item())
            for outcome in load.rest():
                assert judge.judge(outcome)
    wait_all_free(fragile.attach_socket)
    assert fragile.http.arena_is_free()


def test_a_worker_that_dies_right_after_publishing_has_still_answered(fragile: Daemon) -> None:
    item = stub_item(fault="exit-after-ready")
    answer = fragile.http.encode(item)
    with connect(fragile.attach_socket) as session:
        check_rows(session, answer.handle, item)
    wait_all_free(fragile.attach_socket)


def test_a_worker_that_hangs_in_the_forward_is_replaced(fragile: Daemon) -> None:
    pids = set(fragile.worker_pids())
    fragile.http.encode(stub_item(fault="hang-in-forward")).check_problem(422)
    until(lambda: fragile.http.all_ready() and pids.isdisjoint(fragile.worker_pids()), "both replaced")
    item = stub_item()
    answer = fragile.http.encode(item)
    with connect(fragile.attach_socket) as session:
        check_rows(session, answer.handle, item)


@pytest.mark.parametrize(("fault", "status"), [("error-in-forward", 500), ("error-in-decode", 422)])
def test_an_error_in_the_tower_ends_one_request_and_no_worker(stub: Daemon, fault: str, status: int) -> None:
    pids = stub.worker_pids()
    with connect(stub.attach_socket) as session, Load(stub.http, threads=9) as load:
        judge = Judge(session)
        for _ in range(8):
            load.post(stub_item(forward_ms=5))
        load.post(stub_item(fault=fault), req_id="bad")
        for outcome in load.rest():
            if outcome.req_id == "bad":
                assert outcome.answer is not None, outcome.lost
                outcome.answer.check_problem(status, req_id="bad")
            else:
                assert judge.judge(outcome)
    assert stub.worker_pids() == pids
    wait_all_free(stub.attach_socket)


def test_a_stopped_worker_is_killed_and_replaced_and_its_requests_are_answered(hasty_stub: Daemon) -> None:
    hasty_stub.wait_all_ready()
    victim = hasty_stub.http.workers()[0]["pid"]
    pidfd = open_pidfd(victim)
    assert pidfd is not None
    with connect(hasty_stub.attach_socket) as session, Load(hasty_stub.http, threads=8) as load:
        judge = Judge(session)
        os.kill(victim, signal.SIGSTOP)
        for _ in range(8):
            load.post(stub_item())
        for outcome in load.rest():
            assert judge.judge(outcome), "the other worker is there for the retry"
    wait_end(pidfd)
    hasty_stub.wait_all_ready()
    assert victim not in hasty_stub.worker_pids()
    wait_all_free(hasty_stub.attach_socket)


def test_a_live_view_of_a_dead_workers_segment_stays_readable_until_released(stub: Daemon) -> None:
    item = stub_item(rows=500)
    stub.wait_all_ready()
    with connect(stub.attach_socket) as session:
        handle = stub.http.encode(item).handle
        unattached = stub.http.encode(second := stub_item(rows=20)).handle
        with session.attach(handle) as view:
            for pid in stub.worker_pids():
                pidfd = open_pidfd(pid)
                assert pidfd is not None
                os.kill(pid, signal.SIGKILL)
                wait_end(pidfd)
            stub.wait_all_ready()
            assert np.array_equal(view.numpy(), expected_rows(item))
            view.check()
        check_rows(session, unattached, second)
    until(lambda: len(live_segments(stub)) == 2, "the old segments gone")


def live_segments(daemon: Daemon) -> list[tuple[int, int]]:
    """(place, epoch) of every segment that a new session is given."""
    with RawSession(daemon.attach_socket) as eyes:
        return [(segment.grant.index, segment.grant.epoch) for segment in eyes.segments]


def test_all_workers_killed_at_once_is_a_typed_error_and_then_service_again(stub: Daemon) -> None:
    stub.wait_all_ready()
    with connect(stub.attach_socket) as session, Load(stub.http, threads=6) as load:
        judge = Judge(session)
        for _ in range(6):
            load.post(stub_item(forward_ms=200))
        until(lambda: stub.http.in_flight() > 0, "work under way")
        for pid in stub.worker_pids():
            os.kill(pid, signal.SIGKILL)
        for outcome in load.rest():
            judge.judge(outcome, *DEATH_STATUSES)
        until(lambda: stub.http.get("/readyz").status == 200, "ready again")
        item = stub_item()
        check_rows(session, stub.http.encode(item).handle, item)
    wait_all_free(stub.attach_socket)
    assert stub.http.arena_is_free()


def test_readyz_lists_the_worker_that_is_missing(stub: Daemon) -> None:
    stub.wait_all_ready()
    os.kill(stub.worker_pids()[0], signal.SIGKILL)
    until(lambda: not stub.http.all_ready() or stub.http.workers()[0]["restarts"] > 0, "seen")
    assert stub.http.get("/readyz").status == 200, "one worker is enough"
    stub.wait_all_ready()
