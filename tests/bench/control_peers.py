"""What tests.bench.control measures beside encoderd. Each is one process that prints `ready`.

    python -m tests.bench.control_peers bare PORT         Starlette on Hypercorn: reads, answers 200 bytes
    python -m tests.bench.control_peers dispatcher PORT   FastAPI on uvicorn, pickles over pyzmq to a worker

The dispatcher does what encoder servers of this kind do: the event loop decodes the JSON and the base64 and
sends the item as a pickle to a worker process, which computes the same rows as our stub tower and pickles
them back; the answer carries the rows. uvicorn runs on uvloop and httptools, pyzmq on asyncio over ipc.
"""

import asyncio
import base64
import itertools
import os
import pickle  # the peer's way, and only its own bytes
import subprocess
import sys
import tempfile
from typing import Any

import uvloop

ANSWER = b"x" * 200


async def serve_bare(port: int) -> None:
    """The least that any Starlette application on Hypercorn does with such a request."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def encode(request: Request) -> Response:
        async for _ in request.stream():
            pass
        return Response(ANSWER)

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    application = Starlette(routes=[Route("/encode", encode, methods=["POST"])])
    print("ready", flush=True)
    await serve(application, config, mode="asgi")


class Dispatcher:
    """The peer's front process: who waits for which number."""

    def __init__(self, address: str) -> None:
        import zmq
        import zmq.asyncio

        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.bind(address)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def receive(self) -> None:
        """For ever: the worker's answers."""
        while True:
            number, rows = pickle.loads(await self._socket.recv())  # noqa: S301 - our own worker's
            self._waiting.pop(number).set_result(rows)

    async def encode(self, item: bytes) -> Any:
        """The item's rows."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(pickle.dumps((number, item), protocol=5))
        return await answer


async def serve_dispatcher(port: int) -> None:
    """The peer."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    application = FastAPI()
    with tempfile.TemporaryDirectory(prefix="encoderd-bench-") as directory:
        address = f"ipc://{directory}/dispatcher"
        dispatcher = Dispatcher(address)

        async def encode(request: Request) -> Response:
            body = await request.json()
            rows = await dispatcher.encode(base64.b64decode(body["mm_items"][0]))
            return Response(rows.tobytes(), media_type="application/octet-stream")

        application.add_api_route("/encode", encode, methods=["POST"])
        argv = [sys.executable, "-m", "tests.bench.control_peers", "worker", address, str(os.getpid())]
        with subprocess.Popen(argv) as worker:
            receiving = asyncio.create_task(dispatcher.receive())
            print("ready", flush=True)
            config = uvicorn.Config(application, "127.0.0.1", port, log_level="warning", http="httptools")
            try:
                await uvicorn.Server(config).serve()
            finally:
                receiving.cancel()
                worker.kill()


def work(address: str, parent: int) -> None:
    """The peer's worker: the same rows as our stub tower."""
    import signal

    import zmq

    from gpu_workers.families.stub import stub_rows
    from shm import _core

    _core.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    connection = zmq.Context.instance().socket(zmq.DEALER)
    connection.connect(address)
    while True:
        number, item = pickle.loads(connection.recv())  # noqa: S301 - our own parent's
        connection.send(pickle.dumps((number, stub_rows(item)), protocol=5))


if __name__ == "__main__":
    match sys.argv[1]:
        case "bare":
            uvloop.run(serve_bare(int(sys.argv[2])))
        case "dispatcher":
            uvloop.run(serve_dispatcher(int(sys.argv[2])))
        case "worker":
            work(sys.argv[2], int(sys.argv[3]))
