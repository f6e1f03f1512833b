"""app.session_encodes: encodes over a session's rings are those of HTTP, and a hostile client is alone."""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.admission import Admission
from app.engine import Engine
from gpu_workers.families.stub import stub_rows
from shm import _core
from shm.client import Session, View, connect
from shm.encode_call import EncodeRefused
from shm.encode_request import pack_request
from shm.errors import EncodeFailed, LeaseRefused, SessionClosed, WaitTimeout
from shm.layout import (
    SESSION_COMPLETION_CONSUMER_OFFSET,
    SESSION_REQUEST_SLOTS,
    SESSION_SIDE_OFFSET,
    SESSION_SLOT_COUNT,
    SessionDescriptor,
    SessionKind,
)
from shm.messages import ItemSource, Refused, RequestMetadata, Welcome
from shm.session import MAX_DESCRIPTORS, recv_datagram, write_run
from tests.app.support import on_loop, ready_worker, serve_config, until

_greetings = msgspec.msgpack.Decoder(Welcome | Refused)

ENCODE_FOR_EVER = """
import sys, threading
from shm.client import connect
session = connect(sys.argv[1])
for number in range(4):
    item = b"stub forward_ms=1500 %d" % number
    threading.Thread(target=session.encode, args=(item,), daemon=True).start()
    threading.Thread(target=session.encode, args=(bytes(200_000),), daemon=True).start()
print("asked", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def serving(directory: Path, **changes: Any) -> AsyncIterator[tuple[Engine, Session]]:
    """An engine with a ready stub worker, and a session with it; all has come back at the end."""
    config = serve_config(directory, **changes)
    async with Engine(config) as engine:
        await ready_worker(engine)
        session = await asyncio.to_thread(connect, config.attach_socket)
        yield engine, session
        await asyncio.to_thread(session.close)
        await until(lambda: is_idle(engine))


def is_idle(engine: Engine) -> bool:
    now = engine.statistics()
    blocks = sum(segment.blocks for segment in now.segments)
    flights, used = now.inflight.flights, now.arena.total_bytes - now.arena.free_bytes
    return (flights, blocks, used, now.sessions.encoding, now.leases.attached) == (0, 0, 0, 0, 0)


async def encode(session: Session, *items: bytes, **terms: Any) -> View:
    return await asyncio.to_thread(session.encode, list(items), **terms)


class Hostile:
    """A client that writes what it likes into its own memory."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        _, self.descriptors = recv_datagram(self.socket, _greetings, MAX_DESCRIPTORS)
        self.client_fd, control_fd, bell, *_ = self.descriptors
        self.memory = mmap.mmap(self.client_fd, os.fstat(self.client_fd).st_size)
        self.control = mmap.mmap(control_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        side = SESSION_SIDE_OFFSET
        self.ring = _core.Producer(self.memory, side, self.control, side, SESSION_SLOT_COUNT, bell)

    def ask(self, metadata: bytes, rest: bytes = b"", **changes: Any) -> None:
        """Write a run at the input region's start and an ENCODE for it."""
        write_run(self.client_fd, 0, [metadata, rest])
        honest = SessionDescriptor(
            SessionKind.ENCODE,
            request=1,
            nbytes=len(metadata) + len(rest),
            deadline_ns=time.monotonic_ns() + 60_000_000_000,
            metadata_bytes=len(metadata),
        )
        assert self.ring.try_publish(honest._replace(**changes).pack())

    def hung_up(self) -> bool:
        """Blocks until the daemon says something; whether that was the end."""
        try:
            return self.socket.recv(65536) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.ring.close()
        self.socket.close()
        self.memory.close()
        self.control.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def metadata(*items: ItemSource, modality: str = "image") -> bytes:
    return msgspec.msgpack.encode(RequestMetadata(modality, list(items)))


@on_loop
async def test_rows_of_small_and_large_items_are_right_and_all_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, session):
        for items in (
            [b"one"],
            [b"one", b"stub rows=3 two"],
            [os.urandom(5 << 20), b"x", os.urandom(70_000)],
        ):
            with await encode(session, *items) as view:
                rows = [stub_rows(item) for item in items]
                assert view.numpy().tobytes() == b"".join(part.tobytes() for part in rows)
                assert [part.row_count for part in view.metadata.items] == [len(part) for part in rows]


@on_loop
async def test_a_shape_comes_before_the_rows(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, session):
        with await encode(session, b"stub rows=5 forward_ms=200", wait="shape") as view:
            assert view.rows == 5
            await asyncio.to_thread(view.wait_ready, 30.0)
        with pytest.raises(EncodeFailed):  # noqa: PT012 - by encode or by the wait, as it happens
            view = await encode(session, b"stub forward_ms=100 fault=error-in-forward", wait="shape")
            await asyncio.to_thread(view.wait_ready, 30.0)


@on_loop
async def test_the_lease_is_there_at_once_and_the_segment_comes_with_the_first(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        # Connected before any worker is: no segment is in Welcome.
        session = await asyncio.to_thread(connect, config.attach_socket)
        await ready_worker(engine)
        view = await encode(session, b"an item")
        leases = engine.statistics().leases
        assert (leases.attached, leases.unattached) == (1, 0)
        assert (view.numpy() == stub_rows(b"an item")).all()
        view.release()
        await until(lambda: is_idle(engine))
        await asyncio.to_thread(session.close)


@on_loop
async def test_the_same_req_id_joins_and_other_media_under_it_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, session):
        item = b"stub forward_ms=300"
        both = [asyncio.create_task(encode(session, item, req_id="same")) for _ in range(2)]
        await until(lambda: engine.statistics().inflight.waiters == 2)
        assert engine.statistics().inflight.flights == 1
        with pytest.raises(EncodeRefused) as refused:
            await encode(session, b"other", req_id="same")
        assert refused.value.status == 409
        first, second = [await one for one in both]
        assert first.handle == second.handle
        first.release()
        second.check()
        second.release()


@on_loop
async def test_a_timeout_cancels_the_work(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, session):
        with pytest.raises(WaitTimeout):
            await encode(session, b"stub forward_ms=500", timeout=0.1)
        await until(lambda: engine.statistics().sessions.encoding == 0)


@on_loop
async def test_permits_are_those_of_http(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queued_requests=1) as (engine, session):
        busy = asyncio.create_task(encode(session, b"stub forward_ms=300"))
        await until(lambda: engine.statistics().sessions.encoding == 1)
        with pytest.raises(EncodeRefused) as refused:
            await encode(session, b"one more")
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.retry_after_s == 1.0
        (await busy).release()
        (await encode(session, b"after it")).release()


@on_loop
async def test_the_drain_answers_what_is_left(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    ready: list[Engine] = []
    admission = Admission(8, lambda: bool(ready) and ready[0].ready())
    async with Engine(config, admission) as engine:
        ready.append(engine)
        await ready_worker(engine)
        session = await asyncio.to_thread(connect, config.attach_socket)
        busy = asyncio.create_task(encode(session, b"stub forward_ms=1000"))
        await until(lambda: admission.statistics().in_flight == 1)
        admission.close()
        for late in (asyncio.create_task(encode(session, b"late")), busy):
            if late is busy:
                admission.abort()
            with pytest.raises(EncodeRefused) as refused:
                await late
            assert (refused.value.status, refused.value.code) == (503, "draining")
        assert await admission.wait_idle(1.0)
        await asyncio.to_thread(session.close)


@on_loop
async def test_over_its_cap_a_session_is_refused_and_the_block_goes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, session):
        view = await encode(session, b"stub rows=3000")  # 3 MiB of the 4 that a session may hold
        with pytest.raises(LeaseRefused):
            await encode(session, b"stub rows=3001")
        await until(lambda: engine.statistics().segments[0].blocks == 1)
        view.release()
        (await encode(session, b"stub rows=3001")).release()


@on_loop
async def test_a_client_killed_in_the_middle_gives_everything_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, session):
        argv = [sys.executable, "-c", ENCODE_FOR_EVER, session_path(tmp_path)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert await asyncio.to_thread(client.stdout.readline) == b"asked\n"
            await until(lambda: engine.statistics().sessions.encodes >= 8)
            client.send_signal(signal.SIGKILL)
            await until(lambda: engine.statistics().sessions.sessions == 1)
        assert engine.statistics().sessions.encoding == 0
        assert engine.statistics().leases.attached == 0
        await until(lambda: is_idle(engine))
        (await encode(session, b"another")).release()


def session_path(directory: Path) -> str:
    return serve_config(directory).attach_socket


HOSTILE_NUMBERS: dict[str, dict[str, int]] = {
    "offset outside": {"offset": 1 << 40},
    "offset wraps": {"offset": (1 << 64) - 1},
    "nbytes outside": {"nbytes": 1 << 40},
    "offset and nbytes wrap": {"offset": 4096, "nbytes": (1 << 64) - 4096},
    "no metadata": {"metadata_bytes": 0},
    "metadata longer than the run": {"metadata_bytes": 4096},
    "req_id longer than the run": {"req_id_bytes": 4096},
    "head too long": {"nbytes": 1 << 20, "metadata_bytes": 1 << 20},
    "an empty run": {"nbytes": 0},
    "wait": {"wait": 2},
    "kind": {"kind": 77},
}


@pytest.mark.parametrize("numbers", HOSTILE_NUMBERS.values(), ids=HOSTILE_NUMBERS.keys())
@on_loop
async def test_impossible_numbers_end_that_session_only(tmp_path: Path, numbers: dict[str, int]) -> None:
    async with Engine(serve_config(tmp_path)) as engine:
        hostile = await asyncio.to_thread(Hostile, session_path(tmp_path))
        hostile.ask(metadata(ItemSource(64, 4)), bytes(64), **numbers)
        assert await asyncio.to_thread(hostile.hung_up)
        hostile.close()
        await until(lambda: is_idle(engine) and engine.statistics().sessions.sessions == 0)


HOSTILE_HEADS: dict[str, bytes] = {
    "noise": b"\xc1\xff\x00",
    "other types": msgspec.msgpack.encode(["image", "items"]),
    "item outside": metadata(ItemSource(1 << 40, 1)),
    "item longer than the run": metadata(ItemSource(64, 1 << 63)),
    "negative offset": metadata(ItemSource(-1, 1)),
    "negative length": metadata(ItemSource(64, -1)),
    "item on the head": metadata(ItemSource(0, 4)),
    "the same bytes twice": metadata(ItemSource(64, 32), ItemSource(80, 32)),
    "no items": metadata(),
    "a modality that is none": metadata(ItemSource(64, 4), modality="smell"),
    "upper case": metadata(ItemSource(64, 4), modality="IMAGE"),
    "too many items": metadata(*[ItemSource(64, 1)] * 2000),
    "nested too deep": b"\x91" * 100_000,
}


@on_loop
async def test_heads_that_make_no_sense_are_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        await ready_worker(engine)
        hostile = await asyncio.to_thread(Hostile, config.attach_socket)
        for number, head in enumerate(HOSTILE_HEADS.values()):
            hostile.ask(head, bytes(128), request=number)
        await until(lambda: engine.statistics().sessions.encodes == len(HOSTILE_HEADS) and is_idle(engine))
        assert engine.statistics().sessions.sessions == 1
        assert engine.statistics().dispatch.dispatched == 0
        hostile.close()


@on_loop
async def test_two_requests_in_one_slot_end_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, session):
        hostile = await asyncio.to_thread(Hostile, session_path(tmp_path))
        item = b"stub forward_ms=200"
        packed = pack_request([item], "image", "")
        head, rest = packed.pieces[0], b"".join(packed.pieces[1:])
        for request in (1, 1 + SESSION_REQUEST_SLOTS):
            hostile.ask(bytes(head), rest, request=request, metadata_bytes=packed.metadata_bytes)
        assert await asyncio.to_thread(hostile.hung_up)
        hostile.close()
        await until(lambda: engine.statistics().sessions.encoding == 0)
        (await encode(session, b"honest")).release()


def scribble_head(hostile: Hostile) -> None:
    """The completion ring's head: what control reads to see whether there is room."""
    _core.word_store(hostile.memory, SESSION_COMPLETION_CONSUMER_OFFSET, 1 << 60)


def leave_answers(hostile: Hostile) -> None:
    """Ask again and again, and never take an answer."""


@pytest.mark.parametrize("misbehave", [scribble_head, leave_answers])
@on_loop
async def test_a_client_that_spoils_its_completion_ring_loses_its_session(
    tmp_path: Path, misbehave: Callable[[Hostile], None]
) -> None:
    async with serving(tmp_path) as (engine, session):
        hostile = await asyncio.to_thread(Hostile, session_path(tmp_path))
        misbehave(hostile)
        asked = 0
        while engine.statistics().sessions.sessions == 2:
            if asked - engine.statistics().sessions.encodes < 64:
                hostile.ask(metadata(), request=asked)  # answered at once: no items
                asked += 1
            await asyncio.sleep(0)
        assert asked <= SESSION_REQUEST_SLOTS + 128
        hostile.close()
        (await encode(session, b"honest")).release()


@on_loop
async def test_bytes_changed_after_the_copy_change_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, _):
        hostile = await asyncio.to_thread(Hostile, session_path(tmp_path))
        packed = pack_request([b"stub forward_ms=200 rows=2"], "image", "")
        hostile.ask(
            bytes(packed.pieces[0]), b"".join(packed.pieces[1:]), metadata_bytes=packed.metadata_bytes
        )
        await until(lambda: engine.statistics().dispatch.dispatched == 1)
        write_run(hostile.client_fd, 0, [b"\xff" * packed.nbytes])
        await until(lambda: engine.statistics().completions.ready == 1)
        assert engine.statistics().segments[0].used_bytes < 64 << 10
        hostile.close()


@on_loop
async def test_a_session_of_a_stopped_engine_says_so(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        await ready_worker(engine)
        session = await asyncio.to_thread(connect, config.attach_socket)
        await engine.drain(0.0)
        with pytest.raises(EncodeRefused, match="503"):
            await encode(session, b"late")
    with pytest.raises(SessionClosed):
        await encode(session, b"later")
    await asyncio.to_thread(session.close)
