"""A request's own deadline, its name, and the probes that stay fast beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shm.client import Session
from tests.e2e.client import data_url, until
from tests.e2e.daemon import Daemon
from tests.e2e.load import Judge, Load
from tests.e2e.raw_session import wait_all_free
from tests.e2e.stub_items import check_rows, expected_rows, stub_item

DEADLINE = "X-Request-Timeout-Ms"


# --- deadlines ---
def test_a_deadline_that_passes_during_the_forward_is_504_and_frees_everything(
    stub: Daemon, stub_session: Session
) -> None:
    stub.wait_all_ready()
    answer = stub.http.encode(stub_item(forward_ms=600), req_id="late", headers={DEADLINE: "100"})
    answer.check_problem(504, req_id="late")
    until(lambda: stub.http.in_flight() == 0, "the worker done")
    wait_all_free(stub.attach_socket)
    assert stub.http.arena_is_free()
    item = stub_item()
    check_rows(stub_session, stub.http.encode(item).handle, item)


def test_a_deadline_that_passes_in_the_queue_is_504_and_the_others_are_right(
    stub: Daemon, stub_session: Session
) -> None:
    judge = Judge(stub_session)
    with Load(stub.http, threads=24) as load:
        for _ in range(8):
            load.post(stub_item(forward_ms=200))
        until(lambda: stub.http.in_flight() >= 2, "work under way")
        for number in range(16):
            load.post(stub_item(forward_ms=50), req_id=f"hurry-{number}", headers={DEADLINE: "30"})
        for outcome in load.rest():
            allowed = (504,) if outcome.req_id.startswith("hurry") else ()
            judge.judge(outcome, *allowed)
    assert judge.right >= 8
    wait_all_free(stub.attach_socket)


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1e3", ""])
def test_a_deadline_that_is_no_positive_number_is_400(stub: Daemon, value: str) -> None:
    problem = stub.http.encode(stub_item(), headers={DEADLINE: value}).check_problem(400)
    assert DEADLINE.lower() in problem["message"].lower()


# --- names ---
def test_the_same_request_twice_at_once_is_joined_or_refused(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(forward_ms=300)
    with Load(stub.http, threads=2) as load:
        load.post(item, req_id="twin")
        until(lambda: stub.http.in_flight() == 1, "the first under way")
        load.post(item, req_id="twin")
        answers = [outcome.answer for outcome in load.rest()]
    blocks = set()
    for answer in answers:
        assert answer is not None
        if answer.status == 409:
            answer.check_problem(409, req_id="twin")
            continue
        blocks.add((answer.handle.segment, answer.handle.block, answer.handle.generation))
        check_rows(stub_session, answer.handle, item)
    assert len(blocks) == 1, "one forward"
    wait_all_free(stub.attach_socket)


def test_the_same_name_with_other_media_is_409(stub: Daemon, stub_session: Session) -> None:
    first, second = stub_item(forward_ms=300), stub_item()
    with Load(stub.http, threads=1) as load:
        load.post(first, req_id="name")
        until(lambda: stub.http.in_flight() == 1, "the first under way")
        stub.http.encode(second, req_id="name").check_problem(409, req_id="name")
        outcome = load.next()
    assert outcome.answer is not None
    check_rows(stub_session, outcome.answer.handle, first)


def test_a_name_can_be_used_again_when_its_request_has_ended(stub: Daemon, stub_session: Session) -> None:
    for _ in range(3):
        item = stub_item()
        check_rows(stub_session, stub.http.encode(item, req_id="again").handle, item)


def test_thirty_twins_posted_at_once_all_end_with_the_same_rows(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(forward_ms=100)
    right = 0
    with Load(stub.http, threads=30) as load:
        for _ in range(30):
            load.post(item, req_id="crowd")
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            if outcome.answer.status == 200:
                check_rows(stub_session, outcome.answer.handle, item)
                right += 1
            else:
                outcome.answer.check_problem(409, req_id="crowd")
    assert right >= 1
    wait_all_free(stub.attach_socket)


# --- shapes of a request ---
def test_items_of_one_request_keep_their_order(stub: Daemon, stub_session: Session) -> None:
    items = [stub_item(rows=1 + number) for number in range(20)]
    with stub_session.attach(stub.http.encode(items).handle) as view:
        rows = view.numpy()
        for item, part in zip(items, view.metadata.items, strict=True):
            mapped = rows[part.row_start : part.row_start + part.row_count]
            assert np.array_equal(mapped, expected_rows(item))
        del rows, mapped


def test_defaults_aliases_and_unknown_fields_are_taken(stub: Daemon, stub_session: Session) -> None:
    item = stub_item()
    url = data_url(item)
    for body in (
        {"req_id": "d1", "mm_items": [url], "modality": "IMAGE"},
        {"req_id": "d2", "mm_items": [url], "modality": "image", "num_parts": 1, "part_idx": 0},
        {"req_id": "d3", "mm_items": [{"url": url, "detail": "high"}], "modality": "Image", "new_field": 1},
        {"req_id": "d4", "mm_items": [{"type": "image_url", "image_url": {"url": url}}], "modality": "image"},
        {"req_id": "d5", "mm_items": url, "modality": "image"},
        {"req_id": "d6", "mm_items": [url.partition(",")[2]], "modality": "image"},
    ):
        answer = stub.http.post_json("/encode", body)
        assert answer.status == 200, (body["req_id"], answer)
        check_rows(stub_session, answer.handle, item)


def test_the_client_librarys_encode_equals_plain_http(stub: Daemon, stub_session: Session) -> None:
    items = [stub_item(), stub_item(rows=5)]
    with stub_session.encode(items, req_id="library") as view:
        assert np.array_equal(view.numpy(), expected_rows(*items))
    with stub_session.encode([data_url(item) for item in items], req_id="library") as view:
        assert np.array_equal(view.numpy(), expected_rows(*items))


def test_both_listeners_serve_the_same(stub: Daemon, stub_session: Session) -> None:
    for http in (stub.http, stub.tcp):
        item = stub_item()
        check_rows(stub_session, http.encode(item).handle, item)


# --- probes ---
@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/health_generate"])
def test_probes_are_200_while_the_daemon_works(stub: Daemon, path: str) -> None:
    stub.wait_all_ready()
    assert stub.http.get(path).status == 200


def test_the_deep_probe_goes_through_a_real_tower(qwen: Daemon) -> None:
    assert qwen.http.get("/health_generate").status == 200
    wait_all_free(qwen.attach_socket)


def test_probes_do_not_wait_behind_encodes(stub: Daemon, stub_session: Session) -> None:
    judge = Judge(stub_session)
    with Load(stub.http, threads=8) as load:
        for _ in range(8):
            load.post(stub_item(forward_ms=400))
        until(lambda: stub.http.in_flight() >= 2, "work under way")
        assert stub.http.get("/livez").status == 200
        assert stub.http.get("/readyz").status == 200
        assert load.outstanding == 8
        for outcome in load.rest():
            assert judge.judge(outcome)


def test_connections_can_be_kept_and_used_again(stub: Daemon, stub_session: Session) -> None:
    connection = stub.http.connection()
    try:
        for number in range(20):
            item = stub_item()
            body = {"req_id": f"keep-{number}", "mm_items": [data_url(item)], "modality": "image"}
            connection.request("POST", "/encode", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            handle = json.loads(response.read())["handle"]
            with stub_session.attach(handle) as view:
                assert np.array_equal(view.numpy(), expected_rows(item))
    finally:
        connection.close()
