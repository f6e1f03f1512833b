"""One bad item among 31 good ones that come at the same time: the others do not notice."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from shm.client import Session
from tests.e2e.client import until
from tests.e2e.daemon import Daemon
from tests.e2e.load import Judge, Load
from tests.e2e.pictures import picture_bytes
from tests.e2e.stub_items import check_rows, stub_item

CONCURRENCY = 32


@pytest.mark.parametrize(
    ("bad", "statuses"),
    [
        (b"stub rows=none", (422,)),
        (stub_item(fault="error-in-decode"), (422, 500)),
        (stub_item(fault="error-in-forward"), (500,)),
    ],
    ids=["bad header", "fails in decode", "fails in forward"],
)
def test_one_bad_item_among_thirty_one_good_ones_fails_alone(
    stub: Daemon, stub_session: Session, bad: bytes, statuses: tuple[int, ...]
) -> None:
    dispatched_before = stub.http.server_info()["engine"]["dispatch"]["dispatched"]
    judge = Judge(stub_session)
    with Load(stub.http, CONCURRENCY) as load:
        for number in range(CONCURRENCY):
            load.post(bad if number == CONCURRENCY // 2 else stub_item(forward_ms=5))
        for outcome in load.rest():
            assert judge.judge(outcome, *statuses) == (outcome.items[0] != bad)
    assert judge.right == CONCURRENCY - 1
    assert stub.http.server_info()["engine"]["dispatch"]["dispatched"] == dispatched_before + CONCURRENCY


def test_thirty_two_identical_requests_at_once_are_one_forward_and_thirty_two_leases(
    stub: Daemon, stub_session: Session
) -> None:
    """The workers stand still until all have come in, each under a req_id of its own."""
    stub.wait_all_ready()
    item = stub_item()
    before = stub.http.server_info()["engine"]
    everybody = before["inflight"]["joined"] + CONCURRENCY - 1
    pids = stub.worker_pids()
    nonces = set()
    with Load(stub.http, CONCURRENCY) as load:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(CONCURRENCY):
                load.post(item)
            until(lambda: stub.http.server_info()["engine"]["inflight"]["joined"] == everybody, "all joined")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            check_rows(stub_session, outcome.answer.handle, item)
            nonces.add(outcome.answer.handle.nonce)
    after = stub.http.server_info()["engine"]
    assert len(nonces) == CONCURRENCY
    assert after["dispatch"]["dispatched"] == before["dispatch"]["dispatched"] + 1
    assert after["completions"]["ready"] == before["completions"]["ready"] + 1


def test_one_broken_picture_among_thirty_one_good_ones_fails_alone(
    qwen: Daemon, qwen_session: Session
) -> None:
    good = [picture_bytes(56, 56, seed) for seed in range(10, 10 + CONCURRENCY - 1)]
    broken = picture_bytes(56, 56, 2)[:-200]
    dispatched_before = qwen.http.server_info()["engine"]["dispatch"]["dispatched"]
    alone = {}
    for data in good:
        with qwen_session.attach(qwen.http.encode(data).handle) as view:
            alone[data] = view.numpy().copy()
    right = refused = 0
    with Load(qwen.http, CONCURRENCY) as load:
        for data in [*good[: CONCURRENCY // 2], broken, *good[CONCURRENCY // 2 :]]:
            load.post(data)
        for outcome in load.rest():
            assert outcome.answer is not None
            if outcome.items[0] == broken:
                outcome.answer.check_problem(422)
                refused += 1
                continue
            with qwen_session.attach(outcome.answer.handle) as view:
                assert np.allclose(view.numpy(), alone[outcome.items[0]], atol=1e-5)
                right += 1
    assert (right, refused) == (CONCURRENCY - 1, 1)
    after = qwen.http.server_info()["engine"]["dispatch"]["dispatched"]
    assert after == dispatched_before + len(good) + CONCURRENCY
