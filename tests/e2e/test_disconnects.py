"""Clients that vanish at every stage: their work is dropped, their memory comes back, nobody else notices."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable

import pytest

from shm.client import Session, connect
from shm.layout import BlockState
from tests.e2e.client import data_url, until
from tests.e2e.daemon import Daemon
from tests.e2e.raw_session import wait_all_free
from tests.e2e.stub_items import check_rows, stub_item


def request_bytes(item: bytes, extra: str = "", req_id: str = "gone") -> bytes:
    """POST /encode as it goes over the wire."""
    body = json.dumps({"req_id": req_id, "mm_items": [data_url(item)], "modality": "image"}).encode()
    head = f"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def close(connection: socket.socket) -> None:
    """An orderly end."""
    connection.close()


def reset(connection: socket.socket) -> None:
    """RST: what a killed machine or an impatient proxy sends."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


STAGES = {
    "before a byte": 0.0,
    "in the request line": 0.01,
    "in the header": 0.1,
    "at the start of the body": 0.25,
    "in the body": 0.9,
}


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_vanishes_before_its_request_is_whole_leaves_nothing(
    stub: Daemon, stub_session: Session, stage: str, leave: Callable[[socket.socket], None]
) -> None:
    message = request_bytes(stub_item(rows=200))
    connection = stub.tcp.raw_socket()
    connection.sendall(message[: int(len(message) * STAGES[stage])])
    leave(connection)
    item = stub_item()
    check_rows(stub_session, stub.tcp.encode(item).handle, item)
    until(lambda: stub.http.in_flight() == 0, "no request in flight")
    until(lambda: stub.http.arena_is_free(), "the arena free")
    wait_all_free(stub.attach_socket)


@pytest.mark.parametrize("leave", [close, reset])
def test_a_client_that_vanishes_during_the_forward_gives_its_block_back(
    stub: Daemon, stub_session: Session, leave: Callable[[socket.socket], None]
) -> None:
    stub.wait_all_ready()
    connection = stub.tcp.raw_socket()
    connection.sendall(request_bytes(stub_item(rows=300, forward_ms=400)))
    until(lambda: stub.http.in_flight() == 1, "the request at a worker")
    leave(connection)
    until(lambda: stub.http.in_flight() == 0, "the request gone")
    wait_all_free(stub.attach_socket)
    assert stub.http.arena_is_free()
    item = stub_item()
    check_rows(stub_session, stub.http.encode(item).handle, item)


def test_clients_that_vanish_while_queued_are_dropped_before_the_forward(
    stub: Daemon, stub_session: Session
) -> None:
    """Forty requests of 250 ms each would keep both workers busy for seconds; thirty-eight of them leave."""
    connections: list[socket.socket] = []
    for _ in range(40):
        connection = stub.tcp.raw_socket()
        body = request_bytes(stub_item(rows=8, forward_ms=250)).replace(
            b'"gone"', f'"g{len(connections):03d}"'.encode()
        )
        connection.sendall(body)
        connections.append(connection)
    until(lambda: stub.http.in_flight() >= 2, "work under way")
    for connection in connections:
        close(connection)
    item = stub_item()
    check_rows(stub_session, stub.http.encode(item).handle, item)
    until(lambda: stub.http.in_flight() == 0, "no request in flight")
    wait_all_free(stub.attach_socket)
    assert stub.http.arena_is_free()


def test_a_client_that_never_reads_its_answer_holds_it_only_as_long_as_a_handle_may_wait(
    hasty_stub: Daemon,
) -> None:
    connection = hasty_stub.tcp.raw_socket()
    connection.sendall(request_bytes(stub_item()))
    assert connection.recv(12) == b"HTTP/1.1 200"
    reset(connection)
    wait_all_free(hasty_stub.attach_socket)


def test_half_sent_requests_are_ended_by_the_daemons_own_limits(stub: Daemon) -> None:
    """5 s for the headers, 10 s between two pieces of a body: each read blocks until the daemon acts."""
    message = request_bytes(stub_item())
    with stub.tcp.raw_socket() as slow_header, stub.tcp.raw_socket() as slow_body:
        slow_header.sendall(b"POST /encode HTTP/1.1\r\nHost: x\r\n")
        slow_body.sendall(message[:-5])
        answer = slow_header.recv(64)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        answer = slow_body.recv(64)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")
    until(lambda: stub.http.arena_is_free(), "the arena free")


def test_a_block_of_a_vanished_client_is_not_ready_for_anyone(stub: Daemon) -> None:
    from tests.e2e.raw_session import RawSession

    connection = stub.tcp.raw_socket()
    connection.sendall(request_bytes(stub_item(rows=16, forward_ms=200)))
    until(lambda: stub.http.in_flight() == 1, "the request at a worker")
    reset(connection)
    wait_all_free(stub.attach_socket)
    with RawSession(stub.attach_socket) as eyes:
        for segment in eyes.segments:
            assert set(segment.states()) == {BlockState.FREE}


def test_hundreds_that_vanish_before_their_forward_cost_none(hasty_stub: Daemon) -> None:
    stub = hasty_stub
    stub.wait_all_ready()
    completions_before = stub.http.server_info()["engine"]["completions"]
    blockers = []
    for number in range(2):  # one for each worker
        connection = stub.tcp.raw_socket()
        connection.sendall(request_bytes(stub_item(forward_ms=1500), req_id=f"blocker-{number}"))
        blockers.append(connection)
    until(lambda: stub.http.in_flight() == 2, "both workers busy")
    until(lambda: completions(stub, "shapes") == completions_before["shapes"] + 2, "both in their forward")
    generator = random.Random(0)
    clients = []
    for number in range(200):
        connection = stub.tcp.raw_socket()
        connection.sendall(request_bytes(stub_item(), req_id=f"gone-{number}"))
        clients.append(connection)
    until(lambda: stub.http.in_flight() > 2, "some at the workers")
    for connection in generator.sample(clients, len(clients)):
        generator.choice((close, reset))(connection)
    until(lambda: stub.http.in_flight() <= 2, "all dropped")
    for connection in blockers:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
    assert completions(stub, "ready") == completions_before["ready"] + 2
    everything_is_back(stub)


def test_hundreds_that_vanish_at_random_moments_leave_nothing(hasty_stub: Daemon) -> None:
    stub = hasty_stub
    stub.wait_all_ready()
    generator = random.Random(1)
    staying: list[socket.socket] = []
    for number in range(500):
        message = request_bytes(
            stub_item(rows=20, forward_ms=generator.randrange(3)), req_id=f"some-{number}"
        )
        connection = stub.tcp.raw_socket()
        connection.sendall(message[: generator.choice((len(message), generator.randrange(len(message))))])
        staying.append(connection)
        if len(staying) > generator.randrange(40):
            leaving = staying.pop(generator.randrange(len(staying)))
            generator.choice((close, reset))(leaving)
    for connection in staying:
        reset(connection)
    everything_is_back(stub)


def completions(stub: Daemon, kind: str) -> int:
    """How many records of this kind the workers have published."""
    count: int = stub.http.server_info()["engine"]["completions"][kind]
    return count


def held_permits(stub: Daemon) -> tuple[int, int]:
    """Permits that are out, and the bytes of media that they stand for; both of the same moment."""
    admission = stub.http.server_info()["admission"]
    return admission["in_flight"], admission["queued_bytes"]


def everything_is_back(stub: Daemon) -> None:
    """No permit, no page of the arena and no block is held; and it still encodes."""
    until(lambda: stub.http.in_flight() == 0, "no request in flight")
    until(lambda: held_permits(stub) == (0, 0), "every permit and its bytes back")
    until(lambda: stub.http.arena_is_free(), "the arena free")
    wait_all_free(stub.attach_socket)
    item = stub_item()
    with connect(stub.attach_socket) as session:
        check_rows(session, stub.http.encode(item).handle, item)
