"""HTTP requests for benchmarks, from one event loop: at given moments (open loop) or one after the other.

An open loop does not wait for answers: requests leave at the moments that were drawn beforehand, over as many
connections as are busy, and latencies count from the intended moment. So a daemon that falls behind cannot
slow its own load down (coordinated omission).
"""

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer. total_s from the intended moment to the last byte; answer: its JSON."""

    status: int
    total_s: float
    answer: dict[str, Any]


class Traffic:
    """Posts bodies to a daemon's HTTP socket (a Unix path)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open_loop(self, bodies: Sequence[bytes], moments_s: Sequence[float]) -> list[Outcome]:
        """Post bodies[i % len(bodies)] at moments_s[i] from now on."""
        begin_s = time.perf_counter()
        tasks = []
        for number, moment_s in enumerate(moments_s):
            await asyncio.sleep(max(0.0, begin_s + moment_s - time.perf_counter()))
            post = self.post(bodies[number % len(bodies)], begin_s + moment_s)
            tasks.append(asyncio.create_task(post))
        return await asyncio.gather(*tasks)

    async def closed_loop(self, bodies: Sequence[bytes], concurrency: int, total: int) -> list[Outcome]:
        """Post total bodies in turn, concurrency of them at any time."""
        numbers = iter(range(total))
        outcomes: list[Outcome] = []

        async def keep_posting() -> None:
            for number in numbers:
                outcomes.append(await self.post(bodies[number % len(bodies)], time.perf_counter()))

        await asyncio.gather(*(keep_posting() for _ in range(concurrency)))
        return outcomes

    async def post(self, body_rest: bytes, intended_s: float) -> Outcome:
        """One request under a req_id of its own; body_rest as `body_of` makes it."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_unix_connection(self._path)
        body = b'{"req_id":"bench-%d",' % next(_numbers) + body_rest
        writer.write(
            b"POST /encode HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        answer = await reader.readexactly(length)
        total_s = time.perf_counter() - intended_s
        if b"connection: close" in lines:
            writer.close()
        else:
            self._idle.append((reader, writer))
        return Outcome(int(head.split(b" ", 2)[1]), total_s, json.loads(answer))

    def close(self) -> None:
        """Hang up."""
        for _, writer in self._idle:
            writer.close()


def body_of(*items: bytes, **fields: object) -> bytes:
    """A body without its beginning, which is the req_id's."""
    texts = [base64.b64encode(item).decode() for item in items]
    return json.dumps({"mm_items": texts, "modality": "image", **fields}).encode()[1:]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; not a number where there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
