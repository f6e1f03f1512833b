"""One load process of tests.bench.control: so many readers, each asking again as soon as it has its answer.

    python -m tests.bench.control_load http|session ADDRESS READERS ITEM_BYTES SECONDS

Prints `ready`, begins at the first line from stdin, and prints one line of JSON. "http": a thread for each
reader, which sends POST /encode on its own kept connection, the body ready beforehand but for its req_id; the
leases are left to their clock. "session": as a colocated prefill would, one thread and one session, on which
every reader's encode is under way (Session.submit); the rows are mapped, looked at and released. Every item
over a session differs from those before it, so that none joins another.
"""

import base64
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from shm.client import PendingEncode, Session, connect

ROWS = 1  # of every item: what is measured is the way, not the tower
Ask = Callable[[], None]


class Load(NamedTuple):
    """What one process did. latencies_us: sorted."""

    requests: int
    seconds: float
    latencies_us: list[float]


Drive = Callable[[float], Load]  # for so many seconds


def item_of(nbytes: int) -> bytes:
    """An item for the stub tower, unlike all others."""
    head = f"stub rows={ROWS} ".encode()
    return head + os.urandom(nbytes).hex().encode()[: nbytes - len(head)]


def main() -> None:
    """See the module's text."""
    way, address, readers, item_bytes, seconds = sys.argv[1:]
    open_drive = session_drive if way == "session" else http_drive
    with open_drive(address, int(readers), int(item_bytes)) as drive:
        drive(0.0)
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(drive(float(seconds))), flush=True)


@contextmanager
def session_drive(path: str, readers: int, item_bytes: int) -> Iterator[Drive]:
    """One thread; answers are taken in the order in which they were asked for."""
    body = bytearray(item_of(item_bytes))
    counter = itertools.count()

    def submit(session: Session) -> PendingEncode:
        body[-8:] = f"{next(counter):08x}".encode()
        return session.submit(body)  # copied before it returns

    with connect(path) as session:

        def drive(seconds: float) -> Load:
            latencies = []
            begin = time.perf_counter()
            waiting = deque((time.perf_counter(), submit(session)) for _ in range(readers))
            while waiting:
                asked, pending = waiting.popleft()
                with pending.result() as view:
                    assert view.numpy().shape[0] == ROWS
                now = time.perf_counter()
                latencies.append((now - asked) * 1e6)
                if now < begin + seconds:
                    waiting.append((now, submit(session)))
            return Load(len(latencies), time.perf_counter() - begin, sorted(latencies))

        yield drive


@contextmanager
def http_drive(address: str, readers: int, item_bytes: int) -> Iterator[Drive]:
    """Every reader in a thread of its own, until the time is over; each asks once at least."""
    with ExitStack() as stack:
        asks = [stack.enter_context(http_reader(address, item_bytes)) for _ in range(readers)]

        def drive(seconds: float) -> Load:
            begin = time.perf_counter()
            latencies: list[float] = []

            def run(ask: Ask) -> None:
                mine: list[float] = []
                before = begin
                while not mine or before < begin + seconds:
                    ask()
                    now = time.perf_counter()
                    mine.append((now - before) * 1e6)
                    before = now
                latencies.extend(mine)

            threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return Load(len(latencies), time.perf_counter() - begin, sorted(latencies))

        yield drive


@contextmanager
def http_reader(address: str, item_bytes: int) -> Iterator[Ask]:
    """POST /encode on one kept connection; the answer's bytes are read and its status checked."""
    host, _, port = address.partition(":")
    text = base64.b64encode(item_of(item_bytes)).decode()
    rest = f'","mm_items":["{text}"],"modality":"image"}}'.encode()
    length = len('{"req_id":"') + 16 + len(rest)
    head = (
        f"POST /encode HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f'Content-Length: {length}\r\n\r\n{{"req_id":"'
    ).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask() -> None:
            connection.sendall(head + os.urandom(8).hex().encode() + rest)
            read_answer(connection)

        yield ask


def read_answer(connection: socket.socket) -> None:
    """One whole answer of status 200."""
    data = connection.recv(65536)
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    header, _, body = data.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 200"), data
    lengths = [line for line in header.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    missing = int(lengths[0].split(b":")[1]) - len(body)
    while missing > 0:
        missing -= len(connection.recv(65536))


if __name__ == "__main__":
    main()
