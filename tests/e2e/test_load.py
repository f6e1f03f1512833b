"""Many requests at once: every answer is the right one."""

from __future__ import annotations

import numpy as np

from shm.client import Session
from tests.e2e.client import until
from tests.e2e.daemon import Daemon
from tests.e2e.load import Judge, Load
from tests.e2e.pictures import picture_bytes
from tests.e2e.raw_session import wait_all_free
from tests.e2e.stub_items import stub_item


def test_two_hundred_requests_posted_at_once_get_two_hundred_right_answers(
    stub: Daemon, stub_session: Session
) -> None:
    judge = Judge(stub_session)
    with Load(stub.http, threads=200) as load:
        for number in range(200):
            load.post(stub_item(rows=1 + number % 40), stub_item())
        for outcome in load.rest():
            assert judge.judge(outcome)
    assert judge.right == 200
    wait_all_free(stub.attach_socket)


def test_sixty_real_pictures_posted_at_once_equal_the_same_pictures_alone(
    qwen: Daemon, qwen_session: Session
) -> None:
    sizes = [(56 + 28 * (n % 5), 56 + 28 * (n % 3)) for n in range(12)]
    files = [picture_bytes(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    alone = {}
    for data in files:
        with qwen_session.attach(qwen.http.encode(data).handle) as view:
            alone[data] = view.numpy().copy()
    with Load(qwen.http, threads=60) as load:
        for number in range(60):
            load.post(files[number % len(files)])
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            with qwen_session.attach(outcome.answer.handle) as view:
                rows = view.numpy()
                assert rows.shape == alone[outcome.items[0]].shape
                # a batch may split sums otherwise: float32 rounding, nothing more (test_parity has the rule)
                assert np.allclose(rows, alone[outcome.items[0]], rtol=1e-4, atol=1e-5)
                del rows
    wait_all_free(qwen.attach_socket)


def test_requests_beyond_the_queue_are_refused_and_the_others_are_right(
    stub: Daemon, stub_session: Session
) -> None:
    judge = Judge(stub_session)
    with Load(stub.http, threads=300) as load:
        for _ in range(300):
            load.post(stub_item(rows=2, forward_ms=5))
        for outcome in load.rest():
            judge.judge(outcome, 429, 503)
    assert judge.right >= 1
    assert judge.right + sum(judge.refused.values()) == 300
    wait_all_free(stub.attach_socket)


def test_both_workers_take_part_in_a_load(stub: Daemon, stub_session: Session) -> None:
    judge = Judge(stub_session)
    segments = set()
    with Load(stub.http, threads=32) as load:
        for _ in range(32):
            load.post(stub_item(forward_ms=20))
        for outcome in load.rest():
            assert judge.judge(outcome)
            assert outcome.answer is not None
            segments.add(outcome.answer.handle.segment)
    assert segments == {0, 1}


def test_a_full_segment_is_503_with_retry_after_until_handles_are_released(stub: Daemon) -> None:
    """64 MiB segments; handles of 4 MiB that nobody attaches or releases fill them."""
    held = []
    rows = 4096  # x 256 columns x 4 bytes
    while (answer := stub.http.encode(stub_item(rows=rows))).status == 200:
        held.append(answer.handle)
        assert len(held) <= 40, "more than the two segments can hold"
    answer.check_problem(429, 503)
    assert len(held) >= 20
    for handle in held:
        assert stub.http.release(handle).status == 200
    until(lambda: stub.http.encode(stub_item(rows=1)).status == 200, "an answer after the release")


def test_rows_that_can_never_fit_a_segment_are_413(stub: Daemon) -> None:
    stub.http.encode(stub_item(rows=1 << 17)).check_problem(413)
