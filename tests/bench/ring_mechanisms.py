"""Ways of getting a 128-byte message to another process and one back: ours, and what others use.

Each is a Mechanism: built in the parent, which starts nothing and opens no socket, then `measure` runs in
one child and `echo` in another (ring.py pins them). Everybody gets bytes in and gives bytes out, and
nobody pickles. Peers are used as their authors advise for small messages.
"""

import asyncio
import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from time import perf_counter_ns
from typing import Any, Protocol

import faster_fifo
import iceoryx2
import uvloop
import zmq
import zmq.asyncio

from shm import _core

MESSAGE = bytes(range(128))
SPIN_NS = 100_000
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
PATIENCE_NS = 30_000_000_000  # long past any answer: a broken end shows as an error, not as a hang
_ICEORYX2_PREFIX = "bench{pid}_"
SHARED_MEMORY = Path("/dev/shm")
_FORK = multiprocessing.get_context("fork")


class Mechanism(Protocol):
    """One connected pair of ends."""

    def measure(self, count: int) -> list[int]:
        """Nanoseconds of each of count round trips, one after the other."""
        ...

    def echo(self, count: int) -> None:
        """Send count messages back."""
        ...


def round_trips(count: int, send: Callable[[bytes], Any], receive: Callable[[], Any]) -> list[int]:
    """The loop that every synchronous mechanism shares."""
    durations = []
    for _ in range(count):
        begin_ns = perf_counter_ns()
        send(MESSAGE)
        receive()
        durations.append(perf_counter_ns() - begin_ns)
    return durations


class Ring:
    """One of our rings in anonymous shared memory. eventfd: -1 for a futex bell."""

    def __init__(self, *, eventfd: int = -1, slot_count: int = 1024) -> None:
        self._memory = mmap.mmap(-1, 2 * mmap.PAGESIZE + slot_count * _core.SLOT_BYTES)
        self._eventfd = eventfd
        self._slot_count = slot_count

    def producer(self) -> _core.Producer:
        self._memory.madvise(_MADV_POPULATE_WRITE)
        return _core.Producer(self._memory, mmap.PAGESIZE, self._memory, 0, self._slot_count, self._eventfd)

    def consumer(self) -> _core.Consumer:
        self._memory.madvise(_MADV_POPULATE_WRITE)
        return _core.Consumer(self._memory, mmap.PAGESIZE, self._memory, 0, self._slot_count)


class RingFutex:
    """Two rings; both ends spin for spin_ns, then sleep on the futex."""

    def __init__(self, directory: Path, spin_ns: int) -> None:
        self._there, self._back, self._spin_ns = Ring(), Ring(), spin_ns

    def measure(self, count: int) -> list[int]:
        take, spin_ns = self._back.consumer().take, self._spin_ns
        return round_trips(count, self._there.producer().try_publish, lambda: take(PATIENCE_NS, spin_ns))

    def echo(self, count: int) -> None:
        take, publish, spin_ns = self._there.consumer().take, self._back.producer().try_publish, self._spin_ns
        for _ in range(count):
            publish(take(PATIENCE_NS, spin_ns))


class RingEventfd:
    """There by futex to a thread, back by eventfd into a uvloop: as control talks with a worker."""

    def __init__(self, directory: Path) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._there, self._back = Ring(), Ring(eventfd=self._bell)

    def measure(self, count: int) -> list[int]:
        return uvloop.run(self._measure(count))

    async def _measure(self, count: int) -> list[int]:
        loop = asyncio.get_running_loop()
        publish, consumer, bell = self._there.producer().try_publish, self._back.consumer(), self._bell
        answers: list[asyncio.Future[bytes]] = []

        def drain() -> None:
            os.eventfd_read(bell)
            while True:
                while (message := consumer.try_take()) is not None:
                    answers.pop(0).set_result(message)
                if consumer.arm():
                    return

        loop.add_reader(bell, drain)
        consumer.arm()
        durations = []
        for _ in range(count):
            begin_ns = perf_counter_ns()
            answer = loop.create_future()
            answers.append(answer)
            publish(MESSAGE)
            await answer
            durations.append(perf_counter_ns() - begin_ns)
        loop.remove_reader(bell)
        return durations

    def echo(self, count: int) -> None:
        take, publish = self._there.consumer().take, self._back.producer().try_publish
        for _ in range(count):
            publish(take(PATIENCE_NS))


@contextmanager
def zmq_socket(directory: Path, kind: int, *, bind: bool, context: zmq.Context[Any]) -> Iterator[Any]:
    """A socket on an ipc endpoint, its context closed after it.

    pyzmq's defaults are its best here: small messages copied; a high-water mark of 1000 measured faster
    than 10,000 and than none.
    """
    with context, context.socket(kind) as socket:
        endpoint = f"ipc://{directory}/zmq"
        socket.bind(endpoint) if bind else socket.connect(endpoint)
        yield socket


class ZmqPair:
    """pyzmq, blocking PAIR sockets over ipc."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def measure(self, count: int) -> list[int]:
        with zmq_socket(self._directory, zmq.PAIR, bind=True, context=zmq.Context()) as socket:
            return round_trips(count, socket.send, socket.recv)

    def echo(self, count: int) -> None:
        with zmq_socket(self._directory, zmq.PAIR, bind=False, context=zmq.Context()) as socket:
            for _ in range(count):
                socket.send(socket.recv())


class ZmqAsyncio(ZmqPair):
    """pyzmq's asyncio sockets under uvloop, at the measuring end; at the other a blocking socket."""

    def measure(self, count: int) -> list[int]:
        return uvloop.run(self._measure(count))

    async def _measure(self, count: int) -> list[int]:
        with zmq_socket(self._directory, zmq.PAIR, bind=True, context=zmq.asyncio.Context()) as socket:
            durations = []
            for _ in range(count):
                begin_ns = perf_counter_ns()
                await socket.send(MESSAGE)
                await socket.recv()
                durations.append(perf_counter_ns() - begin_ns)
            return durations


class ZmqAsyncioBoth(ZmqAsyncio):
    """pyzmq's asyncio sockets under uvloop at both ends, as SGLang's processes talk."""

    def echo(self, count: int) -> None:
        uvloop.run(self._echo(count))

    async def _echo(self, count: int) -> None:
        with zmq_socket(self._directory, zmq.PAIR, bind=False, context=zmq.asyncio.Context()) as socket:
            for _ in range(count):
                await socket.send(await socket.recv())


class Queues:
    """multiprocessing.Queue, which pickles (there is no way around it)."""

    def __init__(self, directory: Path) -> None:
        self._there, self._back = _FORK.Queue(), _FORK.Queue()

    def measure(self, count: int) -> list[int]:
        return round_trips(count, self._there.put, self._back.get)

    def echo(self, count: int) -> None:
        for _ in range(count):
            self._back.put(self._there.get())
        self._back.close()
        self._back.join_thread()


class Pipe:
    """multiprocessing.Pipe with send_bytes."""

    def __init__(self, directory: Path) -> None:
        self._here, self._there = _FORK.Pipe()

    def measure(self, count: int) -> list[int]:
        return round_trips(count, self._here.send_bytes, self._here.recv_bytes)

    def echo(self, count: int) -> None:
        for _ in range(count):
            self._there.send_bytes(self._there.recv_bytes())


class FasterFifo:
    """faster-fifo, with its pickling replaced by the bytes themselves."""

    def __init__(self, directory: Path) -> None:
        self._there, self._back = (
            faster_fifo.Queue(loads=bytes, dumps=lambda message: message) for _ in range(2)
        )

    @staticmethod
    def _get(queue: Any) -> bytes:
        while True:
            try:
                message: bytes = queue.get()
                return message
            except Empty:
                continue

    def measure(self, count: int) -> list[int]:
        return round_trips(count, self._there.put, lambda: self._get(self._back))

    def echo(self, count: int) -> None:
        for _ in range(count):
            self._back.put(self._get(self._there))


def remove_iceoryx2_leftovers() -> None:
    """iceoryx2 keeps a management segment in /dev/shm for every prefix, after its last node is gone too."""
    for left in SHARED_MEMORY.glob(_ICEORYX2_PREFIX.format(pid=os.getpid()) + "*"):
        left.unlink()


class Iceoryx2Message(ctypes.Structure):
    """The payload type that iceoryx2 wants to know."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Iceoryx2:
    """iceoryx2's Python binding: loan, write in place, send; the receiver spins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pid = os.getpid()

    @contextmanager
    def _ends(
        self, outgoing: str, incoming: str
    ) -> Iterator[tuple[Callable[[bytes], None], Callable[[], bytes]]]:
        config = iceoryx2.config.default()
        config.global_cfg.prefix = iceoryx2.FileName.new(_ICEORYX2_PREFIX.format(pid=self._pid))
        config.global_cfg.root_path = iceoryx2.Path.new(str(self._directory))
        node = iceoryx2.NodeBuilder.new().config(config).create(iceoryx2.ServiceType.Ipc)

        def service(name: str) -> Any:
            builder = node.service_builder(iceoryx2.ServiceName.new(f"{self._directory}/{name}"))
            return builder.publish_subscribe(Iceoryx2Message).open_or_create()

        services = service(outgoing), service(incoming)
        publisher = services[0].publisher_builder().create()
        subscriber = services[1].subscriber_builder().create()
        loan, receive_sample, size_bytes = publisher.loan_uninit, subscriber.receive, len(MESSAGE)

        def send(message: bytes) -> None:
            sample = loan()
            ctypes.memmove(sample.payload_ptr, message, size_bytes)
            sample.assume_init().send()

        def receive() -> bytes:
            while (sample := receive_sample()) is None:
                pass
            return ctypes.string_at(sample.payload_ptr, size_bytes)

        while services[0].dynamic_config.number_of_subscribers < 1:
            pass  # a message published before anybody has subscribed is nobody's
        yield send, receive
        publisher.delete()
        subscriber.delete()

    def measure(self, count: int) -> list[int]:
        with self._ends("there", "back") as (send, receive):
            return round_trips(count, send, receive)

    def echo(self, count: int) -> None:
        with self._ends("back", "there") as (send, receive):
            for _ in range(count):
                send(receive())
