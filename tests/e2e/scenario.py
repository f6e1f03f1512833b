"""Plays the scenario cases of the public set against a daemon: their steps, then their assertions.

One operation is one method; an unknown one is an error, so that a new case is never skipped in silence.
"""

from __future__ import annotations

import json
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.client import connect
from tests.e2e.client import Answer, until
from tests.e2e.daemon import Daemon
from tests.e2e.raw_session import wait_all_free

Json = dict[str, Any]
# when a case names no tolerance of its own: float32 (the manifest's figures for fp32)
FLOAT32_MIN_COSINE, FLOAT32_RELATIVE_L2 = 0.9999, 1e-4


class Reply:
    """An answer and, for a 200, a copy of each item's rows. The lease has ended by then."""

    def __init__(self, daemon: Daemon, answer: Answer) -> None:
        self.answer = answer
        self.status = answer.status
        self.parts: list[NDArray[np.float32]] = []
        if answer.status == 200:
            with connect(daemon.attach_socket) as session, session.attach(answer.handle) as view:
                rows = view.numpy().copy()
                self.parts = [
                    rows[part.row_start : part.row_start + part.row_count] for part in view.metadata.items
                ]

    @property
    def rows(self) -> NDArray[np.float32]:
        assert self.status == 200, self.answer
        return np.concatenate(self.parts)

    def is_class(self, wanted: list[str | int]) -> bool:
        return self.status in wanted or f"{self.status // 100}xx" in wanted


class Player:
    """One scenario's saved replies. play() runs every step, judge() every assertion."""

    def __init__(self, daemon: Daemon, environment: dict[str, str]) -> None:
        self._daemon = daemon
        self._environment = environment
        self._saved: dict[str, Reply] = {}
        self._burst: list[int] = []

    def play(self, steps: list[Json]) -> None:
        for step in steps:
            getattr(self, f"_play_{step['op']}")(step)

    def judge(self, assertions: list[Json]) -> None:
        for assertion in assertions:
            getattr(self, f"_judge_{assertion['op']}")(assertion)

    # --- steps ---
    def _post(self, request: Json) -> Answer:
        items = [self._expand(item) for item in request["mm_items"]]
        return self._daemon.tcp.post_json("/encode", {**request, "mm_items": items})

    def _expand(self, text: str) -> str:
        for name, value in self._environment.items():
            text = text.replace("${" + name + "}", value)
        return text

    def _play_encode(self, step: Json) -> None:
        self._saved[step["save"]] = Reply(self._daemon, self._post(step["request"]))

    _play_raw = _play_encode

    def _play_parallel(self, step: Json) -> None:
        """All requests leave at the same moment."""
        gate = threading.Barrier(len(step["steps"]))

        def run(inner: Json) -> tuple[str, Answer]:
            gate.wait()
            return inner["save"], self._post(inner["request"])

        with ThreadPoolExecutor(len(step["steps"])) as pool:
            for name, answer in list(pool.map(run, step["steps"])):
                self._saved[name] = Reply(self._daemon, answer)

    def _play_release(self, _: Json) -> None:
        """Replies are copied and their leases ended at once: nothing is left to release."""

    def _play_get(self, step: Json) -> None:
        self._saved[step["save"]] = Reply.__new__(Reply)
        answer = self._daemon.tcp.get(step["path"])
        self._saved[step["save"]].answer, self._saved[step["save"]].status = answer, answer.status

    def _play_burst(self, step: Json) -> None:
        def one(number: int) -> Answer:
            return self._daemon.tcp.encode(step["item"], req_id=f"burst-{number}")

        with ThreadPoolExecutor(step["n"]) as pool:
            answers = list(pool.map(one, range(step["n"])))
        self._burst = [answer.status for answer in answers]
        for answer in answers:
            if answer.status == 200:
                self._daemon.tcp.release(answer.handle)

    def _play_cancel_after(self, step: Json) -> None:
        """The client hangs up once its request is under way, or has ended already."""
        body = step["step"]["request"]
        connection = self._daemon.tcp.connection()
        connection.request("POST", "/encode", json.dumps(body), {"Content-Type": "application/json"})
        until(
            lambda: bool(self._daemon.http.in_flight()) or self._readable(connection), "the request under way"
        )
        connection.close()

    @staticmethod
    def _readable(connection: Any) -> bool:
        return bool(select.select([connection.sock], [], [], 0)[0])

    def _play_sleep(self, _: Json) -> None:
        """The case waits for things to settle; the snapshot after it waits for exactly that."""

    def _play_stage_snapshot(self, step: Json) -> None:
        """Nothing in flight and nothing staged, before and after. A handle whose reader vanished may linger
        until its lease times out, which the futex waits of wait_all_free sit through."""
        until(lambda: not self._daemon.http.in_flight(), "nothing in flight")
        wait_all_free(self._daemon.attach_socket)

    # --- assertions ---
    def _judge_status(self, check: Json) -> None:
        reply = self._saved[check["a"]]
        assert reply.is_class(check["in"]), reply.answer
        if reply.status >= 400:
            reply.answer.check_problem(reply.status)

    def _judge_close(self, check: Json) -> None:
        assert_close(self._saved[check["a"]].rows, self._saved[check["b"]].rows)

    def _judge_differ(self, check: Json) -> None:
        first, second = self._saved[check["a"]].rows, self._saved[check["b"]].rows
        assert first.shape != second.shape or not np.allclose(first, second)

    def _judge_differ_or_4xx(self, check: Json) -> None:
        replies = [self._saved[check["a"]], self._saved[check["b"]]]
        if all(reply.status == 200 for reply in replies):
            self._judge_differ(check)
        else:
            assert all(reply.is_class(["2xx", "4xx"]) for reply in replies)

    def _judge_parts(self, check: Json) -> None:
        assert len(self._saved[check["all"]].parts) == check["n"]

    def _judge_part_close(self, check: Json) -> None:
        assert_close(self._saved[check["all"]].parts[check["k"]], self._saved[check["one"]].rows)

    def _judge_own_or_409(self, check: Json) -> None:
        for mine, reference in check["pairs"]:
            reply = self._saved[mine]
            if reply.status == 409:
                reply.answer.check_problem(409)
            else:
                assert_close(reply.rows, self._saved[reference].rows)

    def _judge_finite(self, check: Json) -> None:
        assert np.isfinite(self._saved[check["a"]].rows).all()

    def _judge_burst_statuses(self, check: Json) -> None:
        for status in self._burst:
            assert status in check["in"] or f"{status // 100}xx" in check["in"], status

    def _judge_assembled(self, check: Json) -> None:
        """Whoever puts the parts together has each once: a part sent twice gave the same rows twice."""
        parts: dict[int, NDArray[np.float32]] = {}
        for reply in self._saved.values():
            if reply.status == 200:
                index = reply.answer.json["part_idx"]
                assert_close(reply.rows, parts.setdefault(index, reply.rows))
        assert sorted(parts) == list(range(check["parts"]))

    def _judge_no_growth(self, _: Json) -> None:
        """The second snapshot has waited until all was as before the first."""


def assert_close(first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
    """Row by row cosine and the whole's relative distance."""
    assert first.shape == second.shape
    a, b = first.astype(np.float64), second.astype(np.float64)
    cosine = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    assert cosine.min() >= FLOAT32_MIN_COSINE, cosine.min()
    assert np.linalg.norm(a - b) <= FLOAT32_RELATIVE_L2 * np.linalg.norm(b)
