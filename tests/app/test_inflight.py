"""app.inflight: who waits for which encode."""

import asyncio

import pytest

from app.errors import DuplicateRequest, RequestError, WorkerLost
from app.inflight import Attempt, Inflight, Outcome
from app.jobs import Encoded
from tests.app.support import make_job, on_loop, small_arena

OUTCOME = tuple.__new__(Outcome)


def answers(_: Outcome) -> Encoded:
    """A fresh object each time; what is in it does not matter to the table."""
    return tuple.__new__(Encoded)


@on_loop
async def test_the_same_request_joins_and_each_gets_an_answer_of_its_own() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item"))
        assert inflight.find(make_job(arena, "key", b"item")) is flight
        first, second = flight.join(), flight.join()
        flight.answer(OUTCOME, answers)
        assert await first is not await second
        inflight.end(flight)


@on_loop
async def test_the_same_key_with_other_media_or_another_wait_is_refused() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item"))
        with pytest.raises(DuplicateRequest):
            inflight.find(make_job(arena, "key", b"other"))
        with pytest.raises(DuplicateRequest):
            inflight.find(make_job(arena, "key", b"item", wait="shape"))
        inflight.end(flight)


@on_loop
async def test_the_same_content_joins_whatever_its_key_but_not_for_another_wait() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item", seconds=30))
        twin = make_job(arena, "other key", b"item", seconds=60)
        assert inflight.find(twin) is flight
        inflight.join(flight, twin)
        assert arena.statistics().used_runs == 1, "one input is enough"
        assert flight.deadline_ns == twin.deadline_ns
        assert inflight.find(make_job(arena, "third key", b"item", wait="shape")) is None
        with pytest.raises(DuplicateRequest):
            inflight.find(make_job(arena, "other key", b"other"))
        assert inflight.statistics().joined == 1
        inflight.end(flight)
        assert inflight.find(make_job(arena, "other key", b"other")) is None


@on_loop
async def test_nobody_joins_what_was_abandoned_or_has_ended() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        abandoned = inflight.open(make_job(arena, "key", b"item"))
        inflight.close_to_joiners(abandoned)
        assert inflight.find(make_job(arena, "key", b"other")) is None
        assert inflight.find(make_job(arena, "key", b"item")) is None
        second = inflight.open(make_job(arena, "key", b"other"))
        inflight.end(abandoned)
        assert inflight.find(second.job) is second
        inflight.end(second)
        assert inflight.find(second.job) is None


@on_loop
async def test_the_input_block_is_freed_at_the_end() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item"))
        assert arena.statistics().used_runs == 1
        inflight.end(flight)
        assert arena.statistics().used_runs == 0
        assert inflight.statistics().flights == 0


@on_loop
async def test_a_failure_reaches_everybody_who_still_waits() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item"))
        stays, leaves = flight.join(), flight.join()
        flight.leave(leaves)
        flight.fail(WorkerLost("gone"))
        with pytest.raises(RequestError):
            await stays
        assert leaves.cancelled()
        inflight.end(flight)


@on_loop
async def test_a_flight_is_wanted_while_one_waits_or_has_its_shape() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flight = inflight.open(make_job(arena, "key", b"item"))
        waiter = flight.join()
        assert flight.is_wanted
        flight.leave(waiter)
        assert not flight.is_wanted
        flight.given = Attempt.__new__(Attempt)
        assert flight.is_wanted
        inflight.end(flight)


@on_loop
async def test_the_drain_waits_for_the_last_flight() -> None:
    with small_arena() as arena:
        inflight = Inflight()
        flights = [inflight.open(make_job(arena, key, b"item")) for key in ("a", "b")]
        drained = asyncio.create_task(inflight.wait_empty())
        inflight.end(flights[0])
        await asyncio.sleep(0)
        assert not drained.done()
        inflight.end(flights[1])
        await drained
