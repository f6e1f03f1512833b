"""app.completions: what a worker reports is checked before it is believed."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from app.completions import DRAIN_MAX, Completions, HandleOrigin
from app.dispatch import Dispatch
from app.errors import ItemUndecodable, MemoryFull
from app.inflight import Flight, Inflight, Waiter
from app.jobs import Wait
from app.leases import Leases
from app.segments import Segments
from app.worker import Worker
from shm.arena import InputArena
from shm.errors import ErrorCode
from shm.layout import NO_BLOCK, Completion, CompletionKind, Submission, SubmissionKind, WorkerState
from tests.app.support import HandWorker, hand_workers, make_job, on_loop, record_of, small_arena, until


class Scene:
    """Dispatch, leases and completions around one worker that is played by hand."""

    def __init__(self, arena: InputArena, segments: Segments, hands: list[HandWorker]) -> None:
        self.arena = arena
        self.hand = hands[0]
        self.hands = hands
        self.inflight = Inflight()
        self.leases = Leases(unattached_s=3600, session_cap_bytes=1 << 20, on_unleased=segments.reclaim)
        self.dispatch = Dispatch(self.inflight, self)
        self.progress = 0
        origin = HandleOrigin("00" * 16, "/attach.sock")
        self.completions = Completions(
            self.inflight, self.leases, segments, origin, self._on_progress, self.dispatch.try_again
        )

    def workers(self) -> list[Worker]:
        return [hand.worker for hand in self.hands]

    def expects_a_worker(self) -> bool:
        return False

    def _on_progress(self) -> None:
        self.progress += 1

    def submit(
        self, key: str = "key", wait: Wait = "ready", seconds: float = 30.0
    ) -> tuple[Flight, Waiter, int]:
        """The flight, its one waiter, and the ticket that the first worker has taken."""
        flight = self.inflight.open(make_job(self.arena, key, b"item", wait=wait, seconds=seconds))
        waiter = flight.join()
        self.dispatch.submit(flight)
        [encode] = self.hand.taken()
        return flight, waiter, encode.ticket

    def drain(self) -> None:
        for hand in self.hands:
            self.completions.drain(hand.worker)

    @property
    def is_condemned(self) -> bool:
        return not self.hand.worker.is_trusted


@asynccontextmanager
async def scene(workers: int = 1) -> AsyncIterator[Scene]:
    async with hand_workers(workers) as (segments, hands):
        with small_arena() as arena:
            here = Scene(arena, segments, hands)
            yield here
            here.leases.close()


@on_loop
async def test_ready_gives_the_waiter_a_handle_and_the_workers_timings() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill(rows=3, dim=5)
        here.hand.report(record_of(CompletionKind.SHAPE_KNOWN, ticket, filling))
        filling.ready()
        ready = record_of(CompletionKind.READY, ticket, filling)
        here.hand.report(ready._replace(queue_us=1, preprocess_us=2, forward_us=3, copy_us=4, batch_items=5))
        here.drain()
        encoded = await waiter
        assert (encoded.state, encoded.rows, encoded.dim, encoded.attempt) == ("ready", 3, 5, 1)
        assert (encoded.handle.offset, encoded.handle.nbytes) == (filling.offset, 60)
        assert (encoded.timings.forward_us, encoded.timings.batch_items) == (3, 5)
        assert here.inflight.statistics().flights == 0
        assert here.progress == 1


@on_loop
async def test_ready_without_a_shape_before_it_is_enough() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.drain()
        assert (await waiter).rows == filling.rows


@on_loop
async def test_a_ready_without_a_shape_settles_all_that_its_ticket_cost() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        assert here.hand.worker.shapeless == 1
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.drain()
        await waiter
        assert (here.hand.worker.shapeless, here.hand.worker.outstanding_cost) == (0, 0)
        assert here.hand.segment.used_bytes == 8192, "metadata and payload: a page each"


@on_loop
async def test_a_ready_without_a_shape_whose_block_is_still_filling_condemns_the_worker() -> None:
    async with scene() as here:
        flight, waiter, ticket = here.submit()
        here.hand.report(record_of(CompletionKind.READY, ticket, here.hand.fill()))
        here.drain()
        assert here.is_condemned
        assert not waiter.done()
        assert here.hand.segment.blocks == {}
        flight.leave(waiter)


@on_loop
async def test_who_waits_for_the_shape_has_it_before_the_rows() -> None:
    async with scene() as here:
        flight, waiter, ticket = here.submit(wait="shape")
        here.hand.report(record_of(CompletionKind.SHAPE_KNOWN, ticket, here.hand.fill()))
        here.drain()
        assert (await waiter).state == "shape"
        late = flight.join()
        here.completions.answer_late_joiner(flight)
        assert (await late).handle.nonce != (await waiter).handle.nonce


@on_loop
async def test_the_block_whose_shape_was_given_out_wins_though_another_is_ready_first() -> None:
    async with scene(workers=2) as here:
        _, waiter, ticket = here.submit(wait="shape")
        here.hand.worker.is_slow = True
        here.dispatch.rescue()
        [rescue] = here.hands[1].taken()
        slow_block = here.hand.fill()
        here.hand.report(record_of(CompletionKind.SHAPE_KNOWN, ticket, slow_block))
        here.drain()
        handle = (await waiter).handle
        assert (handle.segment, handle.block) == (0, slow_block.block)
        assert [order.kind for order in here.hands[1].taken()] == [SubmissionKind.CANCEL]
        quick_block = here.hands[1].fill()
        quick_block.ready()
        here.hands[1].report(record_of(CompletionKind.READY, rescue.ticket, quick_block))
        here.drain()
        assert [order.kind for order in here.hands[1].taken()] == [SubmissionKind.RECLAIM]
        assert here.hand.taken() == [], "nobody disturbs the one that readers wait for"
        slow_block.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, slow_block))
        here.drain()
        assert here.inflight.statistics().flights == 0
        assert here.leases.statistics().unattached == 1


@on_loop
async def test_a_deadline_that_passed_before_somebody_with_a_later_one_joined_is_not_the_end() -> None:
    async with scene() as here:
        flight, first, ticket = here.submit(seconds=0.001)
        later = make_job(here.arena, "later", b"item")
        here.inflight.join(flight, later)
        waiter = flight.join()
        flight.leave(first)
        here.hand.report(Completion(CompletionKind.FAILED, ticket, NO_BLOCK, error=ErrorCode.DEADLINE))
        here.drain()
        [again] = here.hand.taken()
        assert again.deadline_ns == later.deadline_ns
        block = here.hand.fill()
        block.ready()
        here.hand.report(record_of(CompletionKind.READY, again.ticket, block))
        here.drain()
        assert (await waiter).attempt == 2


@on_loop
async def test_what_a_stopping_worker_gives_back_is_tried_elsewhere() -> None:
    async with scene(workers=2) as here:
        _, waiter, ticket = here.submit()
        here.hand.link.set_state(WorkerState.DRAINING)
        here.hand.worker.observe()
        here.hand.report(Completion(CompletionKind.FAILED, ticket, NO_BLOCK, error=ErrorCode.WORKER_LOST))
        here.drain()
        [again] = here.hands[1].taken()
        block = here.hands[1].fill()
        block.ready()
        here.hands[1].report(record_of(CompletionKind.READY, again.ticket, block))
        here.drain()
        assert (await waiter).worker == 1


@on_loop
async def test_a_block_that_nobody_waits_for_any_more_is_reclaimed() -> None:
    async with scene() as here:
        flight, waiter, ticket = here.submit()
        flight.leave(waiter)
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.drain()
        assert here.hand.taken() == [Submission(SubmissionKind.RECLAIM, block=0, generation=1)]


@on_loop
async def test_a_failure_names_the_item_and_the_limit() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        failed = Completion(CompletionKind.FAILED, ticket, block=NO_BLOCK, error=ErrorCode.TOO_MANY_PIXELS)
        here.hand.report(failed._replace(error_item=2, error_value=9, error_limit=8))
        here.drain()
        with pytest.raises(ItemUndecodable, match=r"mm_items\[2\] has 9 pixels; the limit is 8"):
            await waiter
        assert here.hand.taken() == []


@on_loop
async def test_a_failed_block_is_reclaimed_known_before_or_not() -> None:
    async with scene() as here:
        for shape_first in (True, False):
            _, waiter, ticket = here.submit()
            filling = here.hand.fill()
            if shape_first:
                here.hand.report(record_of(CompletionKind.SHAPE_KNOWN, ticket, filling))
            filling.fail()
            failed = record_of(CompletionKind.FAILED, ticket, filling)
            here.hand.report(failed._replace(error=ErrorCode.SEGMENT_FULL))
            here.drain()
            with pytest.raises(MemoryFull):
                await waiter
            [reclaim] = here.hand.taken()
            assert here.hand.writer.reclaim(reclaim.block, reclaim.generation)


def unknown_ticket(ready: Completion) -> Completion:
    return ready._replace(ticket=ready.ticket + 1)


def block_outside_the_table(ready: Completion) -> Completion:
    return ready._replace(block=1 << 20)


def offset_outside_the_segment(ready: Completion) -> Completion:
    return ready._replace(offset=1 << 40)


def another_generation(ready: Completion) -> Completion:
    return ready._replace(generation=ready.generation + 1)


def another_shape(ready: Completion) -> Completion:
    return ready._replace(rows=ready.rows + 1)


@pytest.mark.parametrize(
    "forge",
    [
        unknown_ticket,
        block_outside_the_table,
        offset_outside_the_segment,
        another_generation,
        another_shape,
    ],
)
@on_loop
async def test_a_forged_record_condemns_its_worker(forge: Callable[[Completion], Completion]) -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(forge(record_of(CompletionKind.READY, ticket, filling)))
        here.drain()
        assert here.is_condemned
        assert await here.hand.worker.ended == -signal.SIGKILL
        assert not waiter.done()
        assert here.inflight.statistics().flights == 1


@on_loop
async def test_ready_before_the_header_says_so_condemns_the_worker() -> None:
    async with scene() as here:
        _, _, ticket = here.submit()
        here.hand.report(record_of(CompletionKind.READY, ticket, here.hand.fill()))
        here.drain()
        assert here.is_condemned


@on_loop
async def test_a_ticket_ends_once() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.drain()
        assert (await waiter).state == "ready"
        assert here.is_condemned


@on_loop
async def test_nothing_is_read_from_a_worker_after_something_impossible() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(Completion(CompletionKind.READY, 999))
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        here.drain()
        await here.hand.worker.ended
        here.completions.drain_rest(here.hand.worker)
        assert not waiter.done()


@on_loop
async def test_a_drain_is_bounded_and_goes_on_at_the_loops_next_turn() -> None:
    async with scene() as here:
        waiters = []
        for number in range(DRAIN_MAX + 1):
            _, waiter, ticket = here.submit(f"key {number}")
            waiters.append(waiter)
            failed = Completion(CompletionKind.FAILED, ticket, block=NO_BLOCK, error=ErrorCode.SEGMENT_FULL)
            here.hand.report(failed)
        here.drain()
        assert [waiter.done() for waiter in waiters] == [True] * DRAIN_MAX + [False]
        await until(waiters[-1].done)
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert {type(result) for result in results} == {MemoryFull}


@on_loop
async def test_what_a_worker_published_before_it_died_counts() -> None:
    async with scene() as here:
        _, waiter, ticket = here.submit()
        filling = here.hand.fill()
        filling.ready()
        here.hand.report(record_of(CompletionKind.READY, ticket, filling))
        await here.hand.die()
        here.drain()
        assert not waiter.done()
        here.completions.drain_rest(here.hand.worker)
        assert (await waiter).state == "ready"
