"""Readers of every kind: honest, dead, forging, hostile. Only their own leases and sessions are touched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from shm.client import Session, connect
from shm.errors import (
    EncodeFailed,
    LeaseRefused,
    SessionClosed,
    ShmError,
    StaleHandle,
    WaitTimeout,
    WorkerLost,
)
from shm.layout import BlockState
from shm.messages import Handle, Refused
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.load import Judge, Load
from tests.e2e.raw_session import RawSession, wait_all_free
from tests.e2e.stub_items import check_rows, expected_rows, stub_item


@contextlib.contextmanager
def reader(daemon: Daemon, handles: list[Handle]) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A reader process that has attached these handles; and the digests it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.reader", daemon.attach_socket],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(handles) + b"\n")
        process.stdin.flush()
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def digest(item: bytes) -> str:
    return hashlib.sha256(expected_rows(item).tobytes()).hexdigest()


# --- honest ---
def test_two_readers_of_one_block_read_the_same_rows_and_the_first_to_end_takes_nothing_away(
    stub: Daemon, stub_session: Session
) -> None:
    """Two readers hold a lease each on blocks of one segment."""
    items = [stub_item(rows=64) for _ in range(2)]
    handles = [stub.http.encode(item).handle for item in items]
    with stub_session.attach(handles[1]) as view:
        with reader(stub, handles[:1]) as (process, digests):
            assert digests == [digest(items[0])]
            process.communicate()  # its standard input closes: it ends in order
            assert process.returncode == 0
        assert np.array_equal(view.numpy(), expected_rows(items[1]))
    wait_all_free(stub.attach_socket)
    check_rows(stub_session, stub.http.encode(items[0]).handle, items[0])


def test_a_killed_readers_leases_end_and_its_blocks_come_back(stub: Daemon) -> None:
    items = [stub_item(rows=40) for _ in range(12)]
    handles = [stub.http.encode(item).handle for item in items]
    with reader(stub, handles) as (process, digests):
        assert digests == [digest(item) for item in items]
        with RawSession(stub.attach_socket) as eyes:
            assert sum(segment.states().get(BlockState.READY, 0) for segment in eyes.segments) == len(items)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_all_free(stub.attach_socket)


def test_fifty_readers_that_die_leave_no_lease_and_no_descriptor(stub: Daemon) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{stub.process.pid}/fd"))

    handle = stub.http.encode(stub_item()).handle
    with RawSession(stub.attach_socket) as session:
        session.attach(handle)
    wait_all_free(stub.attach_socket)
    before = descriptors()
    for _ in range(50):
        handle = stub.http.encode(stub_item()).handle
        session = RawSession(stub.attach_socket)
        assert not isinstance(session.attach(handle), Refused)
        session.close()
    wait_all_free(stub.attach_socket)
    assert stub.http.get("/livez").status == 200
    assert descriptors() <= before + 2


def test_a_handle_nobody_attaches_ends_by_its_timer_and_then_is_stale(hasty_stub: Daemon) -> None:
    handles = [hasty_stub.http.encode(stub_item()).handle for _ in range(3)]
    with connect(hasty_stub.attach_socket) as session:
        kept = session.attach(handles[0])
        with RawSession(hasty_stub.attach_socket) as eyes:
            for handle in handles[1:]:
                eyes.segment_of(handle).wait_state(handle.block, BlockState.FREE)
            assert eyes.segment_of(handles[0]).header(handles[0].block).state == BlockState.READY
        kept.check()  # an attached lease knows no timer
        kept.release()
        for handle in handles[1:]:
            with pytest.raises(StaleHandle):
                session.attach(handle)
    wait_all_free(hasty_stub.attach_socket)


def test_a_released_view_cannot_be_read(stub: Daemon, stub_session: Session) -> None:
    handle = stub.http.encode(stub_item()).handle
    view = stub_session.attach(handle)
    view.release()
    for read in (view.numpy, view.torch, view.check):
        with pytest.raises(StaleHandle):
            read()
    with pytest.raises(StaleHandle):
        stub_session.attach(handle)


def test_a_handle_released_over_http_is_stale(stub: Daemon, stub_session: Session) -> None:
    handle = stub.http.encode(stub_item()).handle
    assert stub.http.release(handle).status == 200
    with pytest.raises(StaleHandle):
        stub_session.attach(handle)
    stub.http.release(handle).check_problem(404)
    wait_all_free(stub.attach_socket)


def test_dropping_every_array_ends_the_lease(stub: Daemon, stub_session: Session) -> None:
    handle = stub.http.encode(stub_item()).handle
    rows = stub_session.attach(handle).numpy()
    with RawSession(stub.attach_socket) as eyes:
        assert eyes.segment_of(handle).header(handle.block).state == BlockState.READY
        del rows
        eyes.segment_of(handle).wait_state(handle.block, BlockState.FREE)


def test_arrays_are_read_only_and_no_copy(stub: Daemon, stub_session: Session) -> None:
    with stub_session.attach(stub.http.encode(stub_item()).handle) as view:
        rows = view.numpy()
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0] = 1.0
        assert not rows.flags.owndata
        assert view.numpy().ctypes.data == rows.ctypes.data
        assert view.torch().data_ptr() == rows.ctypes.data
        del rows


# --- wait=shape ---
def test_a_handle_given_out_at_shape_known_can_be_waited_for(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(rows=32, forward_ms=300)
    with stub_session.encode([item], wait="shape") as view:
        assert (view.rows, view.dim) == (32, 256)
        assert [part.row_count for part in view.metadata.items] == [32]
        view.wait_ready(timeout=60.0)
        assert view.rows_ready == 32
        assert np.array_equal(view.numpy(), expected_rows(item))
    wait_all_free(stub.attach_socket)


def test_waiting_for_rows_has_its_own_timeout(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(forward_ms=500)
    with stub_session.encode([item], wait="shape") as view:
        with pytest.raises(WaitTimeout):
            view.wait_ready(timeout=0.001)
        view.wait_ready(timeout=60.0)
        assert np.array_equal(view.numpy(), expected_rows(item))


def test_waiting_on_a_worker_that_dies_ends_in_worker_lost(stub: Daemon, stub_session: Session) -> None:
    with stub_session.encode([stub_item(forward_ms=60_000)], wait="shape") as view:
        os.kill(stub.http.workers()[view.handle.segment]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLost):
            view.wait_ready(timeout=60.0)
    wait_all_free(stub.attach_socket)


def test_waiting_on_a_failed_encode_ends_in_encode_failed(stub: Daemon, stub_session: Session) -> None:
    item = stub_item(forward_ms=200, fault="error-in-forward")
    with pytest.raises(EncodeFailed):  # noqa: SIM117 - by encode or by the wait, whichever comes after the failure
        with stub_session.encode([item], wait="shape") as view:
            view.wait_ready(timeout=60.0)
    wait_all_free(stub.attach_socket)


# --- forging ---
FORGED: dict[str, Callable[[Handle], object]] = {
    "boot_id": lambda handle: secrets.token_hex(len(handle.boot_id) // 2),
    "segment": lambda handle: handle.segment ^ 1,
    "epoch": lambda handle: handle.epoch + 1,
    "block": lambda handle: handle.block + 1,
    "generation": lambda handle: handle.generation + 1,
    "offset": lambda handle: handle.offset + 4096,
    "nbytes": lambda handle: handle.nbytes + 1024,
    "rows": lambda handle: handle.rows + 1,
    "dim": lambda handle: handle.dim * 2,
    "dtype": lambda _: "float16",
    "nonce": lambda handle: secrets.token_hex(16),
}


@pytest.mark.parametrize("field", FORGED)
def test_a_handle_with_one_forged_field_is_stale(stub: Daemon, stub_session: Session, field: str) -> None:
    item = stub_item()
    handle = stub.http.encode(item).handle
    forged = msgspec.structs.replace(handle, **{field: FORGED[field](handle)})
    with pytest.raises(StaleHandle):
        stub_session.attach(forged)
    check_rows(stub_session, stub.http.encode(item).handle, item)
    stub.http.release(handle)
    wait_all_free(stub.attach_socket)


def test_ten_thousand_forged_nonces_open_nothing(stub: Daemon, stub_session: Session) -> None:
    item = stub_item()
    handle = stub.http.encode(item).handle
    generator = random.Random(0)
    with RawSession(stub.attach_socket) as forger:
        for _ in range(10_000):
            nonce = f"{generator.getrandbits(128):032x}"
            assert isinstance(forger.attach(msgspec.structs.replace(handle, nonce=nonce)), Refused)
    check_rows(stub_session, handle, item)


def test_another_sessions_lease_cannot_be_attached_again(stub: Daemon, stub_session: Session) -> None:
    item = stub_item()
    handle = stub.http.encode(item).handle
    with stub_session.attach(handle) as view:
        with RawSession(stub.attach_socket) as other:
            assert isinstance(other.attach(handle), Refused)
        assert np.array_equal(view.numpy(), expected_rows(item))


# --- hostile ---
def test_random_words_in_a_sessions_own_memory_end_that_session_only(stub: Daemon) -> None:
    generator = random.Random(1)
    with connect(stub.attach_socket) as honest, Load(stub.http, threads=4) as load:
        judge = Judge(honest)
        for _ in range(30):
            load.post(stub_item(forward_ms=2))
        hostile = [RawSession(stub.attach_socket) for _ in range(6)]
        for session in hostile:
            size = os.fstat(session.client_fd).st_size
            with mmap.mmap(session.client_fd, size) as memory:
                for offset in range(0, size, mmap.PAGESIZE):
                    memory[offset : offset + mmap.PAGESIZE] = generator.randbytes(mmap.PAGESIZE)
            os.write(session.bell_fd, (1).to_bytes(8, "little"))
            assert session.hung_up()
            session.close()
        for outcome in load.rest():
            assert judge.judge(outcome)
    wait_all_free(stub.attach_socket)


def test_a_release_of_someone_elses_lease_ends_nothing(stub: Daemon, stub_session: Session) -> None:
    """Release descriptors with every small lease number, published on a ring of one's own."""
    item = stub_item()
    handle = stub.http.encode(item).handle
    with stub_session.attach(handle) as view:
        with RawSession(stub.attach_socket) as hostile:
            publish_releases(hostile, range(1000))
        view.check()
        with RawSession(stub.attach_socket) as eyes:
            assert eyes.segment_of(handle).header(handle.block).state == BlockState.READY
        assert np.array_equal(view.numpy(), expected_rows(item))


def publish_releases(session: RawSession, leases: range) -> None:
    """As a client would: slots, then the tail, then the bell; and wait until the daemon has taken notice."""
    from shm import _core
    from shm.layout import SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT, SessionDescriptor, SessionKind

    with (
        mmap.mmap(session.client_fd, os.fstat(session.client_fd).st_size) as mine,
        mmap.mmap(
            session.control_fd, os.fstat(session.control_fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ
        ) as theirs,
    ):
        producer = _core.Producer(
            mine, SESSION_SIDE_OFFSET, theirs, SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT, session.bell_fd
        )
        for lease in leases:
            assert producer.try_publish(SessionDescriptor(SessionKind.RELEASE, lease).pack())
        os.write(session.bell_fd, (1).to_bytes(8, "little"))
        del producer


@pytest.mark.parametrize(
    "datagram",
    [b"", b"\x00", b"not msgpack", secrets.token_bytes(4096), msgspec.msgpack.encode({"type": "attach"})],
    ids=["empty", "zero", "text", "noise", "fields missing"],
)
def test_a_datagram_that_is_no_attach_ends_the_session_only(
    stub: Daemon, stub_session: Session, datagram: bytes
) -> None:
    with RawSession(stub.attach_socket) as hostile:
        with contextlib.suppress(BrokenPipeError):
            hostile.socket.send(datagram)
        if not datagram:
            hostile.socket.shutdown(socket.SHUT_WR)
        refusal = hostile.socket.recv(65536)
        assert refusal == b"" or isinstance(msgspec.msgpack.decode(refusal, type=Refused), Refused)
    item = stub_item()
    check_rows(stub_session, stub.http.encode(item).handle, item)


def test_descriptors_sent_to_the_daemon_are_not_kept(stub: Daemon, stub_session: Session) -> None:
    before = len(os.listdir(f"/proc/{stub.process.pid}/fd"))
    with open("/dev/null") as null, RawSession(stub.attach_socket) as hostile:
        for _ in range(8):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(hostile.socket, [b"hello"], [null.fileno()] * 16)
    item = stub_item()
    check_rows(stub_session, stub.http.encode(item).handle, item)
    assert len(os.listdir(f"/proc/{stub.process.pid}/fd")) <= before + 2


def test_what_a_reader_was_given_cannot_be_changed(stub: Daemon, stub_session: Session) -> None:
    """Segments come read-only; the client's own memfd can neither shrink nor grow."""
    item = stub_item()
    handle = stub.http.encode(item).handle
    with stub_session.attach(handle):
        session = RawSession(stub.attach_socket)
        for change in (os.ftruncate, lambda fd, size: os.posix_fallocate(fd, 0, size)):
            for size in (0, 1 << 22):
                with contextlib.suppress(OSError):
                    change(session.client_fd, size)
        assert os.fstat(session.client_fd).st_size > 0
        with pytest.raises(OSError, match=r"."):
            mmap.mmap(session.control_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        session.close()
    check_rows(stub_session, stub.http.encode(item).handle, item)


def test_a_stopped_reader_slows_nobody(stub: Daemon, stub_session: Session) -> None:
    held = stub_item()
    with reader(stub, [stub.http.encode(held).handle]) as (process, _):
        process.send_signal(signal.SIGSTOP)
        judge = Judge(stub_session)
        with Load(stub.http, threads=8) as load:
            for _ in range(40):
                load.post(stub_item())
            for outcome in load.rest():
                assert judge.judge(outcome)
    wait_all_free(stub.attach_socket)


def test_a_session_at_its_cap_is_refused_more_and_other_sessions_are_not(stub: Daemon) -> None:
    """A quarter of a 64 MiB segment: blocks of 4 MiB, so the fifth is too much, until one is released."""
    items = [stub_item(rows=4096) for _ in range(6)]
    handles = [stub.http.encode(item).handle for item in items]
    with connect(stub.attach_socket) as greedy, connect(stub.attach_socket) as modest:
        views = [greedy.attach(handle) for handle in handles[:3]]
        with pytest.raises(LeaseRefused):  # noqa: PT012 - which of the two passes the cap is not the point
            for handle in handles[3:5]:
                views.append(greedy.attach(handle))
        check_rows(modest, handles[5], items[5])
        views.pop().release()
        check_rows(modest, stub.http.encode(items[5]).handle, items[5])
    for handle in handles:
        stub.http.release(handle)
    wait_all_free(stub.attach_socket)


def test_a_closed_session_refuses_everything(stub: Daemon) -> None:
    handle = stub.http.encode(stub_item()).handle
    session = connect(stub.attach_socket)
    session.close()
    with pytest.raises((SessionClosed, ShmError)):
        session.attach(handle)
    stub.http.release(handle)
