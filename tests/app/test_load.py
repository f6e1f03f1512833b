"""app.routes.load: what a router sees."""

from __future__ import annotations

import threading

from tests.e2e.client import until
from tests.e2e.daemon import Daemon


def test_the_load_of_an_idle_daemon_is_nothing(stub_daemon: Daemon) -> None:
    load = stub_daemon.http.get("/load").json
    assert (load["server_load"], load["queue_depth"], load["outstanding_cost"], load["queued_bytes"]) == (
        0,
        0,
        0,
        0,
    )
    assert load["arena_free_bytes"] > 0
    assert [worker["state"] for worker in load["workers"]] == ["ready"]
    assert load["segment_free_bytes"] == load["workers"][0]["segment_free_bytes"] > 0


def test_a_request_under_way_is_seen_with_its_cost(stub_daemon: Daemon) -> None:
    answers = []
    item = b"stub rows=123 forward_ms=300"
    thread = threading.Thread(target=lambda: answers.append(stub_daemon.http.encode(item)))
    thread.start()
    until(lambda: stub_daemon.http.get("/load").json["outstanding_cost"] == 123, "the request's cost")
    load = stub_daemon.http.get("/load").json
    assert load["server_load"] == load["workers"][0]["requests"] == 1
    assert load["queued_bytes"] > 0
    thread.join()
    stub_daemon.http.release(answers[0].handle)
    until(lambda: stub_daemon.http.get("/load").json["server_load"] == 0, "no load")
    assert stub_daemon.http.get("/load").json["requests_per_second"] > 0
