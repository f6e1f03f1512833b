"""app.sessions and app.attach_socket: readers, what they may map, and what their end costs nobody else."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from app.engine import Engine
from gpu_workers.families.stub import stub_rows
from shm.client import Session, connect
from shm.errors import LeaseRefused, SessionClosed, StaleHandle
from shm.layout import SESSION_SIDE_OFFSET
from shm.messages import Attach, Attached, Handle, Refused, Welcome
from shm.session import MAX_DESCRIPTORS, recv_datagram, send_datagram
from tests.app.support import make_job, on_loop, serve_config, until

_greetings = msgspec.msgpack.Decoder(Welcome | Refused)
_answers = msgspec.msgpack.Decoder(Attached | Refused)

HOLD_A_LEASE = """
import sys, msgspec
from shm.client import connect
from shm.messages import Handle
session = connect(sys.argv[1])
view = session.attach(msgspec.json.decode(sys.argv[2], type=Handle))
print(view.rows, flush=True)
sys.stdin.read()
"""


async def open_session(engine_config_path: str) -> Session:
    return await asyncio.to_thread(connect, engine_config_path)


def attach_of(handle: Handle) -> Attach:
    return Attach(handle.nonce, handle.segment, handle.epoch, handle.block, handle.generation)


class RawReader:
    """A client that speaks the attach protocol itself, to misbehave."""

    def __init__(self, path: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(path)

    def greeting(self) -> tuple[Welcome | Refused, list[int]]:
        return recv_datagram(self.connection, _greetings, MAX_DESCRIPTORS)

    def close(self, descriptors: list[int]) -> None:
        self.connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


@on_loop
async def test_a_reader_maps_the_rows_and_its_release_frees_the_block(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        with await open_session(config.attach_socket) as session:
            view = await asyncio.to_thread(session.attach, encoded.handle)
            assert (view.numpy() == stub_rows(b"a picture")).all()
            view.release()
            await until(lambda: engine.statistics().segments[0].blocks == 0)
            with pytest.raises(StaleHandle):
                await asyncio.to_thread(session.attach, encoded.handle)


@on_loop
async def test_the_hang_up_of_a_killed_reader_ends_its_leases(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        handle = msgspec.json.encode(encoded.handle).decode()
        argv = [sys.executable, "-c", HOLD_A_LEASE, config.attach_socket, handle]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert await asyncio.to_thread(reader.stdout.readline) == b"16\n"
            assert engine.statistics().leases.attached == 1
            reader.send_signal(signal.SIGKILL)
            await until(lambda: engine.statistics().segments[0].blocks == 0)
            assert engine.statistics().sessions.sessions == 0


@on_loop
async def test_a_segment_born_after_the_session_comes_with_the_lease(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        with await open_session(config.attach_socket) as session:
            encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
            with await asyncio.to_thread(session.attach, encoded.handle) as view:
                assert (view.numpy() == stub_rows(b"a picture")).all()


@on_loop
async def test_the_cap_stops_one_session_and_no_other(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        # 3 MiB each: a quarter of the segment is 4 MiB
        jobs = [make_job(engine.arena, f"key {number}", b"stub rows=3000") for number in range(2)]
        first, second = [await engine.encode(job) for job in jobs]
        with await open_session(config.attach_socket) as greedy:
            view = await asyncio.to_thread(greedy.attach, first.handle)
            with pytest.raises(LeaseRefused):
                await asyncio.to_thread(greedy.attach, second.handle)
            with await open_session(config.attach_socket) as other:
                other_view = await asyncio.to_thread(other.attach, second.handle)
                assert other_view.rows == 3000
                other_view.release()
            view.release()


@on_loop
async def test_a_user_who_is_not_allowed_is_refused(tmp_path: Path) -> None:
    config = serve_config(tmp_path, attach_allow_uids=(os.getuid() + 1,))
    async with Engine(config) as engine:
        with pytest.raises(SessionClosed):
            await open_session(config.attach_socket)
        assert engine.statistics().sessions.refused == 1


@on_loop
async def test_a_corrupt_ring_ends_that_session_only(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        with await open_session(config.attach_socket) as honest:
            encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
            view = await asyncio.to_thread(honest.attach, encoded.handle)
            hostile = RawReader(config.attach_socket)
            _, descriptors = await asyncio.to_thread(hostile.greeting)
            os.pwrite(descriptors[0], (1 << 60).to_bytes(8, "little"), SESSION_SIDE_OFFSET)
            os.eventfd_write(descriptors[2], 1)
            with pytest.raises(SessionClosed):
                await asyncio.to_thread(recv_datagram, hostile.connection, _answers, 1)
            hostile.close(descriptors)
            assert (view.numpy() == stub_rows(b"a picture")).all()
            view.check()
            assert engine.statistics().sessions.sessions == 1
            view.release()


@pytest.mark.parametrize("datagram", [b"\xc1", b"not msgpack at all", bytes(70_000)])
@on_loop
async def test_a_datagram_that_is_no_request_ends_the_session(tmp_path: Path, datagram: bytes) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        reader = RawReader(config.attach_socket)
        _, descriptors = await asyncio.to_thread(reader.greeting)
        reader.connection.send(datagram)
        await until(lambda: engine.statistics().sessions.sessions == 0)
        reader.close(descriptors)


@on_loop
async def test_a_reader_that_sends_descriptors_loses_its_session_and_none_stays(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        reader = RawReader(config.attach_socket)
        _, descriptors = await asyncio.to_thread(reader.greeting)
        read_end, write_end = os.pipe()
        send_datagram(reader.connection, attach_of(encoded.handle), [write_end])
        os.close(write_end)
        assert await asyncio.to_thread(os.read, read_end, 1) == b""  # every copy of write_end is closed
        os.close(read_end)
        await until(lambda: engine.statistics().sessions.sessions == 0)
        reader.close(descriptors)


@on_loop
async def test_a_reader_that_takes_no_answers_loses_its_session(tmp_path: Path) -> None:
    config = serve_config(tmp_path)
    async with Engine(config) as engine:
        reader = RawReader(config.attach_socket)
        _, descriptors = await asyncio.to_thread(reader.greeting)
        request = Attach("0" * 32, 0, 1, 0, 1)
        reader.connection.setblocking(False)
        while engine.statistics().sessions.sessions:
            try:
                send_datagram(reader.connection, request, [])
            except (BlockingIOError, SessionClosed):
                await asyncio.sleep(0)
        reader.close(descriptors)


@on_loop
async def test_rows_that_a_reader_has_mapped_outlive_the_daemon(tmp_path: Path) -> None:
    config = serve_config(tmp_path, shm_backing="posix")
    async with Engine(config) as engine:
        encoded = await engine.encode(make_job(engine.arena, "key", b"a picture"))
        session = await open_session(config.attach_socket)
        rows = (await asyncio.to_thread(session.attach, encoded.handle)).numpy()
    assert (rows == stub_rows(b"a picture")).all()
    session.close()
