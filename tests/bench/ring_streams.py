"""128-byte messages in one direction as fast as they go: our ring, and pyzmq. Run by ring.py."""

import os
from pathlib import Path
from time import perf_counter_ns
from typing import Protocol

import zmq

from tests.bench.ring_mechanisms import MESSAGE, PATIENCE_NS, SPIN_NS, Ring, zmq_socket

_STREAM_SLOT_COUNT = 65536  # 8 MiB, some 6 ms of messages: a time slice of either end


class OneWay(Protocol):
    """A stream of messages in one direction."""

    def send(self, count: int) -> None:
        """Send count messages as fast as they go."""
        ...

    def receive(self, count: int) -> int:
        """Nanoseconds from the arrival of the first message to that of the last of count."""
        ...


class RingOneWay:
    """One of our rings, spin-then-futex; a sender that finds it full gives up its turn on the core."""

    def __init__(self, directory: Path) -> None:
        self._ring = Ring(slot_count=_STREAM_SLOT_COUNT)

    def send(self, count: int) -> None:
        publish = self._ring.producer().try_publish
        for _ in range(count):
            while not publish(MESSAGE):
                os.sched_yield()

    def receive(self, count: int) -> int:
        consumer = self._ring.consumer()
        take, try_take = consumer.take, consumer.try_take
        take(PATIENCE_NS)
        begin_ns = perf_counter_ns()
        for _ in range(count - 1):
            if try_take() is None:
                take(PATIENCE_NS, SPIN_NS)
        return perf_counter_ns() - begin_ns


class ZmqOneWay:
    """pyzmq PUSH and PULL over ipc."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def send(self, count: int) -> None:
        with zmq_socket(self._directory, zmq.PUSH, bind=True, context=zmq.Context()) as socket:
            send = socket.send
            for _ in range(count):
                send(MESSAGE)

    def receive(self, count: int) -> int:
        with zmq_socket(self._directory, zmq.PULL, bind=False, context=zmq.Context()) as socket:
            receive = socket.recv
            receive()
            begin_ns = perf_counter_ns()
            for _ in range(count - 1):
                receive()
            return perf_counter_ns() - begin_ns
