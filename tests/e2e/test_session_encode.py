"""Session.encode against POST /encode: the same answers, the same refusals, and nothing left behind."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

import numpy as np
import pytest

from shm.client import Session, connect
from shm.encode_call import EncodeRefused
from tests.e2e.client import until
from tests.e2e.daemon import Daemon
from tests.e2e.raw_session import wait_all_free
from tests.e2e.stub_items import expected_rows, stub_item

MEBIBYTE = 1 << 20


def test_the_same_bytes_give_the_same_answer_either_way(stub: Daemon, stub_session: Session) -> None:
    for items in ([stub_item()], [stub_item(rows=3), os.urandom(2 * MEBIBYTE), stub_item(rows=1)]):
        answer = stub.http.encode(items)
        with stub_session.attach(answer.handle) as over_http, stub_session.encode(items) as over_rings:
            assert np.array_equal(over_http.numpy(), over_rings.numpy())
            assert np.array_equal(over_rings.numpy(), expected_rows(*items))
            assert over_http.metadata == over_rings.metadata
            shape = (answer.json["rows"], answer.json["dim"], answer.json["dtype"])
            assert shape == (over_rings.rows, over_rings.dim, over_rings.dtype.label)
    wait_all_free(stub.attach_socket)


REFUSED: dict[str, dict[str, Any]] = {
    "an empty item": {"items": [stub_item(), b""]},
    "no item": {"items": []},
    "too many items": {"items": [b"x"] * 1025},
    "no such modality": {"items": [b"x"], "modality": "smell"},
    "an item that cannot be decoded": {"items": [stub_item(), b"stub rows=none"]},
    "more rows than a segment has": {"items": [b"stub rows=1000000"]},
    "a fault in the decode": {"items": [stub_item(fault="error-in-decode")]},
    "a fault in the forward": {"items": [stub_item(fault="error-in-forward")]},
    "a req_id with a control character": {"items": [b"x"], "req_id": "a\nb"},
    "a req_id that is too long": {"items": [b"x"], "req_id": "a" * 513},
    "an item over the limit": {"items": [bytes(64 * MEBIBYTE + 1)]},
    "a request over the limit": {"items": [bytes(50 * MEBIBYTE)] * 2},
}


@pytest.mark.parametrize("terms", REFUSED.values(), ids=REFUSED.keys())
def test_what_http_refuses_a_session_refuses_in_the_same_words(
    stub: Daemon, stub_session: Session, terms: dict[str, Any]
) -> None:
    terms = dict(terms)
    items = terms.pop("items")
    problem = stub.http.encode(items, **terms).json
    with pytest.raises(EncodeRefused) as refused:
        stub_session.encode(items, **terms)
    assert (refused.value.status, refused.value.code) == (problem["status_code"], problem["code"])
    # An empty item is an empty text in JSON; a body is counted otherwise than an input region.
    if items and b"" not in items and problem["code"] != "body_too_large":
        assert refused.value.message == problem["message"]
    with stub_session.encode(stub_item()) as view:
        view.check()


def test_a_worker_that_dies_is_answered_as_over_http(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(fault="exit-in-forward")
    problem = stub.http.encode(item).json
    until(stub.http.all_ready, "all workers ready")
    with pytest.raises(EncodeRefused) as refused:
        stub_session.encode(stub_item(fault="exit-in-forward"))
    assert refused.value.status == problem["status_code"] == 422
    until(stub.http.all_ready, "all workers ready")
    with stub_session.encode(stub_item()) as view:
        view.check()
    wait_all_free(stub.attach_socket)


def test_texts_and_bytes_may_be_mixed(stub: Daemon, stub_session: Session) -> None:
    item = stub_item()
    with stub_session.encode([item, "data:,text"]) as view:
        assert np.array_equal(view.numpy(), expected_rows(item, b"text"))


def test_many_threads_encode_over_one_session(stub: Daemon, stub_session: Session) -> None:
    wrong: list[bytes] = []

    def work() -> None:
        for number in range(40):
            item = stub_item(rows=1 + number % 3) + bytes(number * 3000)
            with stub_session.encode(item) as view:
                if not np.array_equal(view.numpy(), expected_rows(item)):
                    wrong.append(item)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert stub_session.statistics().encodes == 0
    wait_all_free(stub.attach_socket)


def test_one_thread_has_many_encodes_under_way(stub: Daemon, stub_session: Session) -> None:
    items = [stub_item(rows=1 + number % 3) for number in range(150)]
    pending = [stub_session.submit(item) for item in items]
    for item, one in zip(reversed(items), reversed(pending), strict=True):
        with one.result() as view:
            assert np.array_equal(view.numpy(), expected_rows(item))
    with pytest.raises(ValueError, match="taken already"):
        pending[0].result()
    wait_all_free(stub.attach_socket)


def test_what_is_submitted_and_never_taken_leaves_nothing(stub: Daemon, stub_session: Session) -> None:
    cancelled = stub_session.submit(stub_item(forward_ms=100))
    forgotten = stub_session.submit(stub_item(forward_ms=100))
    cancelled.cancel()
    with pytest.raises(ValueError, match="cancelled"):
        cancelled.result()
    del forgotten
    refused = stub_session.submit(b"stub rows=none")
    with pytest.raises(EncodeRefused) as over_rings:
        refused.result()
    assert over_rings.value.code == "item_undecodable"
    stub_session.encode(stub_item()).release()
    wait_all_free(stub.attach_socket)


def test_one_req_id_is_one_encode_over_http_and_over_a_session(stub: Daemon, stub_session: Session) -> None:
    item, req_id = stub_item(forward_ms=500), uuid.uuid4().hex
    handles = []
    over_http = threading.Thread(target=lambda: handles.append(stub.http.encode(item, req_id=req_id).handle))
    over_http.start()
    until(lambda: stub.http.in_flight() == 1, "the request over HTTP is under way")
    with stub_session.encode(item, req_id=req_id) as view:
        over_http.join()
        assert (handles[0].block, handles[0].generation) == (view.handle.block, view.handle.generation)
        stub.http.release(handles[0])
        assert np.array_equal(view.numpy(), expected_rows(item))
    wait_all_free(stub.attach_socket)


def test_a_session_sees_workers_that_came_after_it(stub: Daemon) -> None:
    with connect(stub.attach_socket) as session:
        with pytest.raises(EncodeRefused):
            session.encode(stub_item(fault="exit-in-forward"))
        until(stub.http.all_ready, "all workers ready")
        for _ in range(8):
            item = stub_item()
            with session.encode(item) as view:
                assert np.array_equal(view.numpy(), expected_rows(item))
    wait_all_free(stub.attach_socket)
