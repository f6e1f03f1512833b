"""app.cost: rows that a job stands for, learned from the shapes of those before it."""

import pytest

from app.cost import CostModel
from tests.app.support import make_job, small_arena


def test_an_estimate_grows_with_items_and_bytes() -> None:
    with small_arena() as arena:
        costs = CostModel()
        small, two, large = (
            costs.estimate(make_job(arena, "key", *items)) for items in ([b"1"], [b"1", b"2"], [bytes(10**6)])
        )
        assert 0 < small < two < large


def test_estimates_follow_the_shapes_that_workers_report() -> None:
    with small_arena() as arena:
        costs = CostModel()
        job = make_job(arena, "key", b"picture")
        for _ in range(300):
            costs.learn(job, 1000)
        assert costs.estimate(job) == pytest.approx(1000, rel=0.01)
        assert costs.estimate(make_job(arena, "key", b"a", b"b")) > 1500
