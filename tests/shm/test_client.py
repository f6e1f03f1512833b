"""shm.client: connecting, attaching, what is refused, and what is left when an end dies."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shm.client import Session, connect
from shm.errors import EncodeFailed, LeaseRefused, SessionClosed, StaleHandle, WorkerLost
from shm.layout import LAYOUT_VERSION, Dtype
from shm.messages import Handle, Refused, Welcome
from shm.session import send_datagram
from tests.bench.attach_process import AttachServer
from tests.bench.attach_server import Fail, LoseWorker, Ready, Reclaim, SetCap, Stall, expected_bytes

READER = """
import os, signal, sys, msgspec
from shm.client import connect
session = connect(sys.argv[1])
view = session.attach(msgspec.json.decode(sys.argv[2]))
print(view.numpy().tobytes().hex(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
LIGHT = """
import sys
import shm.client
assert not {"torch", "starlette", "httpx", "hypercorn", "uvloop"} & set(sys.modules)
"""


def ready(server: AttachServer, seed: int = 1) -> Handle:
    handle = server.fill(seed=seed)
    server.tell(Ready(handle), str)
    return handle


def test_a_handle_may_come_as_the_json_that_http_returns(server: AttachServer, session: Session) -> None:
    handle: dict[str, Any] = msgspec.to_builtins(ready(server))
    with session.attach(handle) as view:
        assert view.numpy().tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)
    with pytest.raises(StaleHandle, match="not a handle"):
        session.attach({"block": 1})


def test_many_leases_come_and_go_and_none_is_left(server: AttachServer, session: Session) -> None:
    first = ready(server)
    for handle in server.grant(first, 1500):  # more than the ring has slots
        with session.attach(handle) as view:
            assert view.rows_ready == 4
    server.await_leases(0)
    assert session.statistics() == (0, 1, 0, 0)


def test_a_nonce_is_good_for_one_lease(server: AttachServer, session: Session) -> None:
    handle = ready(server)
    with session.attach(handle):
        with pytest.raises(StaleHandle):
            session.attach(handle)
        server.await_leases(1)


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "0" * 32}, {"nonce": ""}, {"nonce": "x" * 100_000}, {"generation": 2}, {"generation": 0},
        {"generation": 2**64}, {"generation": -1}, {"block": 1}, {"block": 2**63}, {"segment": 1},
        {"epoch": 2}, {"boot_id": "00" * 16}, {"offset": 0}, {"nbytes": 4}, {"rows": 3}, {"rows": 5},
        {"dim": 16}, {"dtype": "float16"},
    ],
)  # fmt: skip
def test_an_altered_handle_is_stale_and_leaves_no_lease(
    server: AttachServer, session: Session, change: dict[str, Any]
) -> None:
    handle = ready(server)
    with pytest.raises(StaleHandle):
        session.attach(msgspec.structs.replace(handle, **change))
    server.await_leases(0)
    with session.attach(server.grant(handle, 1)[0]) as view:
        view.check()


def test_a_block_that_was_reclaimed_or_refilled_is_stale(server: AttachServer, session: Session) -> None:
    handle = ready(server)
    assert server.tell(Reclaim(handle), bool)
    with pytest.raises(StaleHandle):
        session.attach(handle)
    again = server.fill(seed=2)
    assert (again.block, again.generation) == (handle.block, handle.generation + 1)
    with pytest.raises(StaleHandle):
        session.attach(server.grant(handle, 1)[0])
    server.await_leases(0)


def test_a_failed_or_lost_block_is_told_at_attach_and_leaves_no_lease(
    server: AttachServer, session: Session
) -> None:
    failed, lost = server.fill(), server.fill()
    server.tell(Fail(failed), str)
    with pytest.raises(EncodeFailed):
        session.attach(failed)
    server.tell(LoseWorker(abandon=False), str)
    with pytest.raises(WorkerLost):
        session.attach(lost)
    server.await_leases(0)


def test_over_its_cap_a_session_is_refused_until_it_releases(server: AttachServer, session: Session) -> None:
    first, second, third = server.grant(ready(server), 3)
    server.tell(SetCap(first.nbytes), str)
    view = session.attach(first)
    with pytest.raises(LeaseRefused, match="release"):
        session.attach(second)
    session.release(view)
    server.await_leases(0)
    with session.attach(third):
        server.await_leases(1)


def test_a_segment_that_came_later_is_mapped_when_it_is_first_needed(
    server: AttachServer, session: Session
) -> None:
    kept = session.attach(ready(server, seed=1))
    server.tell(LoseWorker(abandon=False), str)
    with session.attach(ready(server, seed=2)) as view:
        assert view.handle.epoch == 2
        assert view.numpy().tobytes() == expected_bytes(2, 4, 8, Dtype.FLOAT32)
        assert kept.numpy().tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)
    assert session.statistics().segments == 2


def test_an_abandoned_segment_is_unmapped_when_the_next_one_comes(
    server: AttachServer, session: Session
) -> None:
    array = session.attach(ready(server)).numpy()
    with session.attach(ready(server, seed=3)):
        pass
    server.tell(LoseWorker(abandon=True), str)
    with session.attach(ready(server, seed=2)):
        pass
    assert session.statistics().segments == 1
    assert array.tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)


def test_threads_share_a_session(server: AttachServer, session: Session) -> None:
    handles = [ready(server, seed=seed) for seed in range(8)]
    wrong: list[int] = []

    def read(seed: int, grants: list[Handle]) -> None:
        for handle in grants:
            with session.attach(handle) as view:
                if view.numpy().tobytes() != expected_bytes(seed, 4, 8, Dtype.FLOAT32):
                    wrong.append(seed)

    threads = [
        threading.Thread(target=read, args=(seed, server.grant(handle, 100)))
        for seed, handle in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    server.await_leases(0)


def test_a_killed_reader_loses_its_leases_and_nobody_else_does(
    server: AttachServer, session: Session
) -> None:
    handle, other = server.grant(ready(server), 2)
    with session.attach(other) as view:
        argv = [sys.executable, "-c", READER, server.path, msgspec.json.encode(handle).decode()]
        reader = subprocess.run(argv, stdout=subprocess.PIPE)
        assert bytes.fromhex(reader.stdout.decode()) == expected_bytes(1, 4, 8, Dtype.FLOAT32)
        server.await_leases(1)
        view.check()


def test_after_the_daemons_death_attaching_says_so_and_mapped_rows_stay(
    server: AttachServer, session: Session
) -> None:
    late, early = server.grant(ready(server), 2)
    view = session.attach(early)
    server.kill()
    with pytest.raises(SessionClosed):
        session.attach(late)
    assert view.numpy().tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)
    view.release()
    with pytest.raises(SessionClosed):
        session.encode(b"x")


def test_a_daemon_that_does_not_answer_ends_the_session(server: AttachServer) -> None:
    handle = ready(server)
    with connect(server.path, timeout=0.2) as session:
        server.tell(Stall(True), str)
        for _ in range(2):
            with pytest.raises(SessionClosed):
                session.attach(handle)
        server.tell(Stall(False), str)
    server.await_leases(0)


def test_closing_releases_everything_and_gives_every_descriptor_back(server: AttachServer) -> None:
    before = set(os.listdir("/proc/self/fd"))
    session = connect(server.path)
    view = session.attach(ready(server))
    session.close()
    session.close()
    server.await_leases(0)
    assert view.released
    for late in (lambda: session.attach(view.handle), lambda: session.encode(b"x")):
        with pytest.raises(SessionClosed, match="closed"):
            late()
    assert set(os.listdir("/proc/self/fd")) == before


def test_where_there_is_no_daemon_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SessionClosed, match=r"attach\.sock"):
        connect(str(tmp_path / "attach.sock"))


def greeting_with(path: Path, greeting: msgspec.Struct) -> None:
    """One connect to a listener that says this and passes no descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def greet() -> None:
            peer, _ = listener.accept()
            with peer:
                send_datagram(peer, greeting, [])

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            connect(str(path))
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (Refused("protocol"), "refuses this session"),
        (Welcome(1, LAYOUT_VERSION + 1, "", "", []), "layout"),
        (Welcome(1, LAYOUT_VERSION, "", "", []), "without the descriptors"),
        (Handle("", 0, 0, 0, 0, 0, 0, 0, 0, "", ""), "no message"),
    ],
)
def test_a_greeting_that_is_no_welcome_is_an_error_and_leaks_nothing(
    tmp_path: Path, greeting: msgspec.Struct, reason: str
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SessionClosed, match=reason):
        greeting_with(tmp_path / "attach.sock", greeting)
    assert set(os.listdir("/proc/self/fd")) == before


def test_memfd_segments_serve_readers_as_posix_ones_do(tmp_path: Path) -> None:
    with (
        AttachServer(str(tmp_path / "attach.sock"), backing="memfd") as server,
        connect(server.path) as session,
        session.attach(ready(server, seed=4)) as view,
    ):
        assert np.array_equal(
            view.numpy().ravel(), np.frombuffer(expected_bytes(4, 4, 8, Dtype.FLOAT32), np.float32)
        )


def test_the_client_loads_no_torch_and_no_web_server() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
