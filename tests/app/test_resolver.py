"""app.resolver: a name whose server is silent delays nobody else, and not the end of the process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from ipaddress import ip_address
from typing import Any

import pytest

from app.errors import QueueFull
from app.resolver import MAX_LOOKUPS, Answers, Resolver
from tests.app.support import on_loop

HANG = """
import asyncio, threading
from app.resolver import Resolver

begun = threading.Event()

def hang(*_, **__):
    begun.set()
    threading.Event().wait()

async def main():
    task = asyncio.create_task(Resolver(hang).addresses("silent.test", 80))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.wait([task])

asyncio.run(main())
print("ended")
"""


class Server:
    """A name server that is silent about some names until it is told to speak."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.speak = threading.Event()

    def lookup(self, host: str, port: int, **_: Any) -> Answers:
        self.asked.append(host)
        if host.startswith("silent"):
            self.speak.wait()
        if host.endswith("missing"):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]


@on_loop
async def test_silent_names_do_not_delay_others_and_the_same_name_is_asked_for_once() -> None:
    server = Server()
    resolver = Resolver(server.lookup)
    silent = [asyncio.create_task(resolver.addresses(f"silent{n % 20}", 80)) for n in range(40)]
    assert await resolver.addresses("quick", 80) == [ip_address("192.0.2.1")]
    silent[0].cancel()
    server.speak.set()
    others = await asyncio.gather(*silent[1:])
    assert others == [[ip_address("192.0.2.1")]] * 39
    assert len(server.asked) == 21


@on_loop
async def test_look_ups_are_bounded_and_a_missing_name_is_an_error_for_everybody() -> None:
    server = Server()
    resolver = Resolver(server.lookup)
    waiting = [asyncio.create_task(resolver.addresses(f"silent{n}.missing", 80)) for n in range(MAX_LOOKUPS)]
    waiting.append(asyncio.create_task(resolver.addresses("silent0.missing", 80)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await resolver.addresses("one more", 80)
    server.speak.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, socket.gaierror) for error in errors)
    assert await resolver.addresses("one more", 80)


def test_the_process_ends_though_a_look_up_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, check=True)
    assert done.stdout == "ended\n"
