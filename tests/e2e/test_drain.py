"""SIGTERM: what was accepted is answered, what comes later is refused, then nothing is left (Daemon.stop)."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from shm.client import connect
from tests.e2e.client import Answer, until
from tests.e2e.conftest import STUB
from tests.e2e.daemon import Daemon
from tests.e2e.load import Load
from tests.e2e.stub_items import expected_rows, stub_item


def test_requests_in_flight_are_answered_and_new_ones_refused() -> None:
    with Daemon(".", *STUB) as daemon:
        with Load(daemon.http, threads=4) as load:
            items = [stub_item(forward_ms=500) for _ in range(4)]
            for item in items:
                load.post(item)
            until(lambda: daemon.http.in_flight() == 4, "all four at the workers")
            daemon.terminate()
            daemon.wait_notified("STOPPING=1")
            refused = answer_or_refusal(daemon)
            assert refused is None or refused.status == 503
            for outcome in load.rest():
                assert outcome.answer is not None, outcome.lost
                assert outcome.answer.status == 200, outcome.answer
        daemon.stop()


def answer_or_refusal(daemon: Daemon) -> Answer | None:
    """None when the daemon no longer takes connections."""
    try:
        return daemon.http.encode(stub_item())
    except OSError:
        return None


def test_readyz_is_503_while_draining() -> None:
    with Daemon(".", *STUB) as daemon:
        with Load(daemon.http, threads=1) as load:
            load.post(stub_item(forward_ms=800))
            until(lambda: daemon.http.in_flight() == 1, "at the worker")
            connection = daemon.http.connection()
            connection.connect()
            daemon.terminate()
            daemon.wait_notified("STOPPING=1")
            try:
                connection.request("GET", "/readyz")
                assert connection.getresponse().status == 503
            except OSError:
                pass  # the daemon no longer answers probes at all: as true an answer
            finally:
                connection.close()
            for outcome in load.rest():
                assert outcome.answer is not None, outcome.lost
                assert outcome.answer.status == 200
        daemon.stop()


def test_a_stop_with_an_open_session_and_a_live_view_ends_in_order() -> None:
    with Daemon(".", *STUB) as daemon:
        item = stub_item(rows=100)
        handle = daemon.http.encode(item).handle
        with connect(daemon.attach_socket) as session, session.attach(handle) as view:
            rows = view.numpy()
            daemon.stop()
            assert np.array_equal(rows, expected_rows(item))
            del rows


def test_work_left_at_the_end_of_the_drain_is_503() -> None:
    with Daemon(".", *STUB, "--shutdown-timeout", "1") as daemon:
        with Load(daemon.http, threads=1) as load:
            load.post(stub_item(forward_ms=3000))
            until(lambda: daemon.http.in_flight() == 1, "at the worker")
            daemon.terminate()
            outcome = load.next()
            assert outcome.answer is not None, outcome.lost
            outcome.answer.check_problem(503)
        daemon.stop()


def test_a_second_signal_ends_it_at_once_and_leaves_nothing() -> None:
    with Daemon(".", *STUB) as daemon:
        with Load(daemon.http, threads=1) as load:
            load.post(stub_item(forward_ms=60_000))
            until(lambda: daemon.http.in_flight() == 1, "at the worker")
            daemon.terminate()
            daemon.wait_notified("STOPPING=1")
            daemon.terminate()
            outcome = load.next()
            assert outcome.lost is not None or outcome.answer is not None
        daemon.process.wait()
        daemon.check_nothing_left()
        daemon.discard()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_daemon_stopped_while_it_loads_ends_in_order(number: signal.Signals) -> None:
    daemon = Daemon(".", *STUB)
    try:
        until_listening(daemon)
        daemon.terminate(number)
        daemon.stop()
    finally:
        daemon.discard()


def until_listening(daemon: Daemon) -> None:
    """Ask /livez until it answers: the listener is up before the workers are."""

    def answers() -> bool:
        assert daemon.process.poll() is None, daemon.tail()
        try:
            return daemon.http.get("/livez").status == 200
        except OSError:
            return False

    until(answers, "/livez answers")
