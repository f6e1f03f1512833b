"""Requests in flight: posted from threads, judged one by one by the test's own thread as answers come."""

from __future__ import annotations

import http.client
import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from shm.client import Session
from shm.messages import Handle
from tests.e2e.client import SOCKET_TIMEOUT_S, Answer, Http
from tests.e2e.stub_items import check_rows


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    items: tuple[bytes, ...]
    req_id: str
    answer: Answer | None
    lost: Exception | None = None


class Load:
    """A closed loop: post() starts a request, next() blocks until any of those outstanding has ended."""

    def __init__(self, http: Http, threads: int) -> None:
        self._http = http
        self._pool = ThreadPoolExecutor(threads)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._posted = 0
        self.outstanding = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def post(self, *items: bytes, **fields: Any) -> None:
        """Start one request with these items."""
        self._posted += 1
        self.outstanding += 1
        self._pool.submit(self._run, items, fields.pop("req_id", f"load-{id(self)}-{self._posted}"), fields)

    def _run(self, items: tuple[bytes, ...], req_id: str, fields: dict[str, Any]) -> None:
        try:
            answer = self._http.encode(list(items), req_id=req_id, **fields)
            outcome = Outcome(items, req_id, answer)
        except (OSError, http.client.HTTPException) as error:
            outcome = Outcome(items, req_id, None, error)
        self._outcomes.put(outcome)

    def next(self) -> Outcome:
        """The next outcome; blocks."""
        outcome = self._outcomes.get(timeout=SOCKET_TIMEOUT_S)
        self.outstanding -= 1
        return outcome

    def rest(self) -> Iterable[Outcome]:
        """Outcomes until nothing is outstanding."""
        while self.outstanding:
            yield self.next()


class Judge:
    """Holds every outcome to the promise: the right bytes or one typed error; no handle given out twice."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: set[tuple[object, ...]] = set()
        self.right = 0
        self.refused: dict[int, int] = {}

    def judge(self, outcome: Outcome, *allowed: int) -> bool:
        """True for the right bytes; False for a typed error whose status is allowed; else AssertionError."""
        assert outcome.answer is not None, f"lost: {outcome.lost!r}"
        answer = outcome.answer
        if answer.status == 200:
            assert answer.json["req_id"] == outcome.req_id
            self._count_handle(answer.handle)
            check_rows(self._session, answer.handle, *outcome.items)
            self.right += 1
            return True
        answer.check_problem(*allowed, req_id=outcome.req_id)
        self.refused[answer.status] = self.refused.get(answer.status, 0) + 1
        return False

    def _count_handle(self, handle: Handle) -> None:
        for key in (
            ("nonce", handle.nonce),
            ("block", handle.segment, handle.epoch, handle.block, handle.generation),
        ):
            assert key not in self._seen, f"given out twice: {key}"
            self._seen.add(key)
