"""Clients that vanish at every stage: their work is dropped, their memory comes back, nobody else notices."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable

import pytest

from shm.client import Session
from shm.layout import BlockState
from tests.e2e.client import data_url, until
from tests.e2e.daemon import Daemon
from tests.e2e.raw_session import wait_all_free
from tests.e2e.stub_items import check_rows, stub_item


def request_bytes(item: bytes, extra: str = "") -> bytes:
    """POST /encode as it goes over the wire."""
    body = json.dumps({"req_id": "gone", "mm_items": [data_url(item)], "modality": "image"}).encode()
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
