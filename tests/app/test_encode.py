"""app.encode and app.routes.encode: one request's life through a real engine with a stub worker."""

from __future__ import annotations

import json

import msgspec
import pytest

from shm.client import connect
from shm.messages import Handle
from tests.e2e.client import data_url, until
from tests.e2e.daemon import Daemon
from tests.e2e.stub_items import check_rows


def test_the_answer_has_every_field(stub_daemon: Daemon) -> None:
    answer = stub_daemon.http.encode([b"stub rows=3", b"stub rows=5"], req_id="r1", num_parts=2, part_idx=1)
    body = answer.json
    assert (body["req_id"], body["modality"], body["num_parts"], body["part_idx"]) == ("r1", "image", 2, 1)
    assert (body["rows"], body["dim"], body["dtype"], body["state"]) == (8, 256, "float32", "ready")
    assert (body["embedding_size"], body["embedding_len"], body["embedding_dim"]) == (8 * 256 * 4, 8, 256)
    assert [(item["row_start"], item["row_count"]) for item in body["items"]] == [(0, 3), (3, 5)]
    assert body["grid_thw"] == [[1, 3, 1], [1, 5, 1]]
    assert set(body["timings"]) == {"ingest", "queue", "preprocess", "forward", "copy", "total"}
    assert body["timings"]["total"] >= body["timings"]["ingest"]
    assert body["handle"]["nbytes"] == body["embedding_size"]
    assert body["handle"]["attach"] == stub_daemon.attach_socket
    assert stub_daemon.http.release(answer.handle).status == 200
    stub_daemon.http.release(answer.handle).check_problem(404)


def test_wait_shape_answers_before_the_forward_is_done(stub_daemon: Daemon) -> None:
    answer = stub_daemon.http.encode(b"stub rows=2 forward_ms=300", wait="shape")
    assert answer.json["state"] == "shape"
    assert answer.json["rows"] == 2
    stub_daemon.http.release(answer.handle)
    until(lambda: stub_daemon.http.in_flight() == 0, "the forward is over")


def test_a_timeout_of_the_request_is_504_and_frees_everything(stub_daemon: Daemon) -> None:
    headers = {"X-Request-Timeout-Ms": "50"}
    answer = stub_daemon.http.encode(b"stub forward_ms=500", req_id="late", headers=headers)
    answer.check_problem(504, req_id="late")
    until(lambda: stub_daemon.http.in_flight() == 0, "the work is dropped")
    assert stub_daemon.http.arena_is_free()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1e3", ""])
def test_a_timeout_that_is_no_number_is_400(stub_daemon: Daemon, text: str) -> None:
    headers = {"X-Request-Timeout-Ms": text}
    problem = stub_daemon.http.encode(b"stub", headers=headers).check_problem(400)
    assert "X-Request-Timeout-Ms" in problem["message"]


def test_two_parts_of_one_request_may_be_under_way_together(stub_daemon: Daemon) -> None:
    """The same req_id with other media is a conflict only within one part."""
    bodies = [
        {"req_id": "p", "modality": "IMAGE", "num_parts": 2, "part_idx": part, "mm_items": [data_url(item)]}
        for part, item in enumerate((b"stub forward_ms=300", b"stub rows=4"))
    ]
    connection = stub_daemon.http.connection()
    connection.request("POST", "/encode", json.dumps(bodies[0]), {"Content-Type": "application/json"})
    until(lambda: stub_daemon.http.in_flight() == 1, "the first part at the worker")
    conflict = {**bodies[0], "mm_items": [data_url(b"stub rows=9")]}
    refused = stub_daemon.http.post_json("/encode", conflict)
    other_part = stub_daemon.http.post_json("/encode", bodies[1])
    response = connection.getresponse()
    response.read()
    connection.close()
    refused.check_problem(409, req_id="p")
    assert (response.status, other_part.status) == (200, 200)


@pytest.mark.parametrize(
    "fields",
    [{"mm_items": [7]}, {"mm_items": [""]}, {"num_parts": "1"}, {"modality": "smell"}, {"hashes": {}}],
)
def test_a_refused_body_is_answered_under_its_req_id(stub_daemon: Daemon, fields: dict[str, object]) -> None:
    body = {"req_id": "mine", "modality": "image", "mm_items": [data_url(b"stub")], **fields}
    problem = stub_daemon.http.post_json("/encode", body).check_problem(400, req_id="mine")
    assert next(iter(fields)) in problem["message"]


def test_a_req_id_that_is_refused_is_not_repeated(stub_daemon: Daemon) -> None:
    body = {"req_id": "a\r\nb", "modality": "image", "mm_items": [data_url(b"stub")]}
    assert stub_daemon.http.post_json("/encode", body).check_problem(400)["req_id"] == ""


def test_a_worker_error_becomes_a_problem_with_the_item(stub_daemon: Daemon) -> None:
    answer = stub_daemon.http.encode([b"stub rows=1", b"stub fault=error-in-decode"], req_id="bad")
    problem = answer.check_problem(400, 422, req_id="bad")
    assert problem["item_index"] == 1
    assert "mm_items[1]" in problem["message"]


def test_the_log_line_tells_sizes_and_never_media(stub_daemon: Daemon) -> None:
    item = b"stub rows=1 a-word-nobody-else-uses"
    stub_daemon.http.encode(item, req_id="logged", headers={"X-Request-Id": "id-of-the-log-test"})

    def lines() -> list[str]:
        return [line for line in stub_daemon.log().splitlines() if "id-of-the-log-test" in line]

    until(lambda: stub_daemon.http.get("/livez").status == 200 and bool(lines()), "logged after the answer")
    (line,) = map(json.loads, lines())
    assert (line["status"], line["req_id"], line["items"], line["rows"]) == (200, "logged", 1, 1)
    assert data_url(item)[-20:] not in stub_daemon.log()


def test_each_of_several_receivers_has_a_handle_of_its_own(stub_daemon: Daemon) -> None:
    item = b"stub rows=3"
    answer = stub_daemon.http.encode(item, receive_count=3)
    handles = msgspec.convert(answer.json["handles"], list[Handle])
    assert handles[0] == answer.handle
    assert len({handle.nonce for handle in handles}) == 3
    assert len({(handle.block, handle.generation) for handle in handles}) == 1
    with connect(stub_daemon.attach_socket) as session:
        for handle in handles:
            check_rows(session, handle, item)
    for handle in handles:
        until(lambda lost=handle: stub_daemon.http.release(lost).status == 404, "every lease ended")
    assert "handles" not in stub_daemon.http.encode(item).json


@pytest.mark.parametrize("receivers", [0, 65])
def test_a_number_of_receivers_out_of_range_is_400(stub_daemon: Daemon, receivers: int) -> None:
    problem = stub_daemon.http.encode(b"stub", receive_count=receivers).check_problem(400)
    assert "receive_count" in problem["message"]
