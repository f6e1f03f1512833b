"""app.dispatch: which worker encodes what, and what becomes of an encode that loses its worker."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from app.dispatch import Dispatch
from app.errors import MemoryFull, NoWorkerReady, PoisonInput, QueueFull, WorkerLost
from app.inflight import Flight, Inflight
from app.worker import CREDIT, LINK_SLOT_COUNT, Worker
from shm.arena import InputArena
from shm.layout import CompletionKind, Submission, SubmissionKind
from tests.app.support import HandWorker, hand_workers, make_job, on_loop, record_of, small_arena


class Scene:
    """Dispatch over workers that are played by hand. It is its own workforce."""

    def __init__(
        self, arena: InputArena, hands: list[HandWorker], add_hand: Callable[[], HandWorker]
    ) -> None:
        self.arena = arena
        self.hands = hands
        self.served: set[str] = set()
        self._add_hand = add_hand
        self.expected = False
        self.inflight = Inflight()
        self.dispatch = Dispatch(self.inflight, self)

    def workers(self) -> list[Worker]:
        return [hand.worker for hand in self.hands if not hand.worker.ended.done()]

    def expects_a_worker(self) -> bool:
        return self.expected

    def submit(self, key: str, *items: bytes) -> Flight:
        flight = self.inflight.open(make_job(self.arena, key, *(items or (key.encode(),))))
        flight.join()
        self.dispatch.submit(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Its worker has answered it."""
        flight.is_harmless = True
        for attempt in list(flight.attempts):
            self.inflight.attempt_ended(attempt)
        self.served.add(flight.job.req_key)
        self.inflight.conclude(flight)

    def finish(self, hand: HandWorker) -> None:
        """The worker has answered all that it had."""
        hand.taken()
        for attempt in list(hand.worker.attempts.values()):
            self.end(attempt.flight)

    def finish_all(self) -> None:
        while self.inflight.statistics().flights:
            for hand in self.hands:
                self.finish(hand)
            self.dispatch.pump()

    async def lose(self, hand: HandWorker) -> None:
        await hand.die()
        self.dispatch.worker_lost(hand.worker)

    async def replace_lost(self) -> None:
        """The only worker dies, and has a successor."""
        await self.lose(self.hands[0])
        self.hands[0] = self._add_hand()


@asynccontextmanager
async def scene(workers: int) -> AsyncIterator[Scene]:
    async with hand_workers(workers) as (segments, hands):

        def add_hand() -> HandWorker:
            hands.append(HandWorker(segments, epoch=len(hands) + 1))
            return hands[-1]

        with small_arena() as arena:
            here = Scene(arena, list(hands), add_hand)
            yield here
            here.finish_all()
            assert arena.statistics().used_runs == 0


def places(flights: list[Flight]) -> list[int]:
    return [flight.attempt.worker.place for flight in flights if flight.attempt is not None]


@on_loop
async def test_equals_take_turns() -> None:
    async with scene(workers=3) as here:
        flights = [here.submit(f"key {number}") for number in range(6)]
        assert places(flights) == [0, 1, 2, 0, 1, 2]


@on_loop
async def test_the_worker_with_the_least_cost_outstanding_is_chosen() -> None:
    async with scene(workers=2) as here:
        flights = [here.submit("heavy", b"1", b"2", b"3")]
        flights += [here.submit(f"light {number}") for number in range(3)]
        assert places(flights) == [0, 1, 1, 1]


@on_loop
async def test_the_descriptor_says_where_the_input_is() -> None:
    async with scene(workers=1) as here:
        job = here.submit("key", b"one", b"two").job
        [encode] = here.hands[0].taken()
        assert encode == Submission(
            SubmissionKind.ENCODE,
            ticket=1,
            deadline_ns=job.deadline_ns,
            arena_offset=job.block.offset,
            arena_nbytes=job.block.nbytes,
            metadata_bytes=job.metadata_bytes,
            item_count=2,
        )


@on_loop
async def test_without_any_hope_of_a_worker_the_request_fails_at_once() -> None:
    async with scene(workers=0) as here:
        flight = here.inflight.open(make_job(here.arena, "key", b"item"))
        waiter = flight.join()
        here.dispatch.submit(flight)
        with pytest.raises(NoWorkerReady):
            await waiter


@on_loop
async def test_a_request_waits_for_a_worker_that_is_expected() -> None:
    async with scene(workers=1) as here:
        late = here.hands.pop()
        here.expected = True
        flight = here.submit("key")
        assert flight.attempt is None
        assert here.dispatch.statistics().waiting == 1
        here.hands.append(late)
        here.dispatch.pump()
        assert places([flight]) == [0]


@on_loop
async def test_credit_bounds_what_a_worker_has_and_the_rest_waits_in_order() -> None:
    async with scene(workers=1) as here:
        worker = here.hands[0].worker
        first = here.submit("first")
        for number in range(CREDIT - 1):
            here.submit(f"key {number}")
        waiting = [here.submit("a"), here.submit("b")]
        assert len(worker.attempts) == CREDIT
        assert first.attempt is not None
        worker.settle(first.attempt)
        here.inflight.end(first)
        here.dispatch.pump()
        assert waiting[0].attempt is not None
        assert waiting[1].attempt is None
        here.dispatch.abandon(waiting[1])


@on_loop
async def test_a_full_ring_is_backpressure_and_no_order_is_lost() -> None:
    async with scene(workers=1) as here:
        hand = here.hands[0]
        for number in range(LINK_SLOT_COUNT + 10):
            here.hands[0].worker.outbox.send(Submission(SubmissionKind.RECLAIM, block=number))
        flight = here.submit("key")
        assert flight.attempt is None
        taken = hand.taken()
        here.dispatch.pump()
        hand.worker.outbox.flush()
        here.dispatch.pump()
        taken += hand.taken()
        assert flight.attempt is not None
        assert [order.block for order in taken[:-1]] == list(range(LINK_SLOT_COUNT + 10))
        assert taken[-1].kind is SubmissionKind.ENCODE


@on_loop
async def test_what_a_lost_worker_had_is_tried_again_in_groups_apart_from_the_rest() -> None:
    async with scene(workers=3) as here:
        flights = [here.submit(f"key {number}") for number in range(15)]
        suspects, others = flights[0::3], [*flights[1::3], *flights[2::3]]
        await here.lose(here.hands[0])
        assert places(suspects) == [], "both workers are busy with others"
        here.finish(here.hands[1])
        here.dispatch.pump()
        assert places(suspects) == [1, 1]
        assert [flight.attempts_made for flight in suspects] == [2, 2, 1, 1, 1]
        assert places([here.submit("fresh")]) == [2], "a group has its worker for itself"
        for flight in suspects[:2]:
            here.end(flight)
        here.dispatch.pump()
        assert [flight.attempts_made for flight in suspects] == [2, 2, 2, 2, 1]
        assert here.dispatch.statistics().retried == 5
        assert all(flight.attempts_made == 1 for flight in others)


@on_loop
async def test_one_killer_among_many_is_found_and_nobody_else_is_refused() -> None:
    async with scene(workers=1) as here:
        here.expected = True
        keys = [f"key {number}" for number in range(60)]
        flights = [here.submit(key, key.encode()) for key in keys]
        killer = flights[37]
        killer_waiter = killer.join()
        deaths = 0
        while not killer.is_over:
            if killer.attempts:
                deaths += 1
                await here.replace_lost()
            else:
                here.finish(here.hands[0])
            here.dispatch.pump()
        with pytest.raises(PoisonInput):
            await killer_waiter
        assert deaths == 4, "60, 15, 4 and 1 suspects"
        here.finish_all()
        assert here.served == set(keys) - {keys[37]}
        assert here.dispatch.statistics().suspects == 1, "the others are cleared"


@on_loop
async def test_a_suspect_that_comes_again_is_tried_alone_and_cleared_if_it_survives() -> None:
    async with scene(workers=2) as here:
        first = here.submit("first", b"perhaps")
        here.dispatch.abandon(first)
        first.leave(next(iter(first.waiters)))
        await here.lose(here.hands[0])
        here.submit("other", b"other")
        again = here.submit("again", b"perhaps")
        assert again.attempt is None
        here.finish(here.hands[1])
        here.dispatch.pump()
        assert places([again]) == [1]
        assert here.submit("third", b"third").attempt is None, "one alone is alone"
        here.finish(here.hands[1])
        here.dispatch.pump()
        assert here.dispatch.statistics().suspects == 0
        assert here.dispatch.statistics().waiting == 0


@on_loop
async def test_an_abandoned_suspect_leaves_the_quarantine() -> None:
    async with scene(workers=1) as here:
        here.expected = True
        flights = [here.submit(key, key.encode()) for key in ("a", "b")]
        await here.lose(here.hands[0])
        assert here.dispatch.statistics().waiting == 2
        for flight in flights:
            here.dispatch.abandon(flight)
        assert here.dispatch.statistics().waiting == 0
        assert here.inflight.statistics().flights == 0


@on_loop
async def test_a_suspect_whose_client_goes_before_it_was_tried_stays_one() -> None:
    async with scene(workers=1) as here:
        here.expected = True
        flights = [here.submit(key, key.encode()) for key in ("a", "b")]
        await here.replace_lost()
        here.dispatch.pump()
        tried = next(flight for flight in flights if flight.attempts)
        here.dispatch.abandon(tried)
        tried.waiters.clear()
        [attempt] = tried.attempts
        here.inflight.attempt_ended(attempt)  # CANCELLED
        here.inflight.conclude(tried)
        here.dispatch.pump()
        assert here.dispatch.statistics().suspects == 2
        here.finish_all()
        assert here.dispatch.statistics().suspects == 1


@on_loop
async def test_the_workers_that_were_told_to_stop_accuse_nobody() -> None:
    async with scene(workers=2) as here:
        flight = here.submit("key")
        here.hands[0].worker.stop()
        await here.lose(here.hands[0])
        assert places([flight]) == [1]
        assert here.dispatch.statistics().suspects == 0


@on_loop
async def test_an_encode_whose_shape_was_given_out_is_not_moved() -> None:
    async with scene(workers=2) as here:
        flight = here.submit("key")
        flight.given = flight.attempt
        await here.lose(here.hands[0])
        assert here.hands[1].taken() == []
        assert here.inflight.statistics().flights == 0


@on_loop
async def test_an_abandoned_encode_is_cancelled_at_its_worker_and_not_retried() -> None:
    async with scene(workers=2) as here:
        flight = here.inflight.open(make_job(here.arena, "key", b"item"))
        here.dispatch.submit(flight)
        here.dispatch.abandon(flight)
        assert [order.kind for order in here.hands[0].taken()] == [
            SubmissionKind.ENCODE,
            SubmissionKind.CANCEL,
        ]
        await here.lose(here.hands[0])
        assert here.hands[1].taken() == []
        assert here.inflight.statistics().flights == 0


@on_loop
async def test_an_abandoned_encode_that_still_waits_is_dropped() -> None:
    async with scene(workers=0) as here:
        here.expected = True
        flight = here.submit("key")
        here.dispatch.abandon(flight)
        assert here.dispatch.statistics().waiting == 0
        assert here.inflight.statistics().flights == 0


@on_loop
async def test_a_known_shape_replaces_the_estimate_of_a_cost() -> None:
    async with scene(workers=2) as here:
        flights = [here.submit("first"), here.submit("second")]
        first, second = flights[0].attempt, flights[1].attempt
        assert first is not None
        assert second is not None
        assert first.worker.outstanding_cost == second.worker.outstanding_cost
        here.hands[0].taken()
        block = here.hands[0].fill(rows=4)
        record = record_of(CompletionKind.SHAPE_KNOWN, first.ticket, block)
        first.worker.shape_known(first, here.hands[0].segment.admit(record, first))
        assert first.worker.outstanding_cost == 4
        assert places([here.submit("third"), here.submit("fourth")]) == [0, 1]


@on_loop
async def test_a_slow_worker_gets_no_more_and_what_it_has_is_tried_elsewhere() -> None:
    async with scene(workers=2) as here:
        flights = [here.submit(f"key {number}") for number in range(2)]
        slow = here.hands[0].worker
        slow.is_slow = True
        here.dispatch.rescue()
        here.dispatch.rescue()
        assert [attempt.number for attempt in flights[0].attempts] == [1, 2]
        assert [attempt.worker.place for attempt in flights[0].attempts] == [0, 1]
        assert len(flights[1].attempts) == 1
        assert places([here.submit("later")]) == [1]
        assert here.dispatch.statistics().rescued == 1
        here.inflight.attempt_ended(flights[0].attempts[0])


@on_loop
async def test_the_death_of_a_stuck_worker_leaves_the_second_try_alone() -> None:
    async with scene(workers=2) as here:
        flight = here.submit("key")
        here.hands[0].worker.is_slow = True
        here.dispatch.rescue()
        await here.lose(here.hands[0])
        assert places([flight]) == [1]
        assert not flight.is_over
        assert here.dispatch.statistics().retried == 0


@on_loop
async def test_content_that_two_workers_died_of_is_refused() -> None:
    async with scene(workers=3) as here:
        doomed = here.submit("key", b"poison")
        waiter = doomed.join()
        await here.lose(here.hands[0])
        assert places([doomed]) == [1]
        here.dispatch.check_content(doomed.job.digest)
        await here.lose(here.hands[1])
        with pytest.raises(PoisonInput):
            await waiter
        with pytest.raises(PoisonInput):
            here.dispatch.check_content(doomed.job.digest)
        assert here.inflight.statistics().flights == 0


@on_loop
async def test_the_death_of_the_attempt_that_was_given_out_ends_the_flight_in_spite_of_another() -> None:
    async with scene(workers=2) as here:
        flight = here.submit("key")
        waiter = flight.join()
        here.hands[0].worker.is_slow = True
        here.dispatch.rescue()
        flight.given = flight.attempts[0]
        await here.lose(here.hands[0])
        with pytest.raises(WorkerLost):
            await waiter
        here.hands[1].taken()
        here.inflight.attempt_ended(flight.attempts[0])


@on_loop
async def test_a_full_ring_and_a_full_segment_are_seen_before_admission() -> None:
    async with scene(workers=1) as here:
        here.dispatch.check_room()
        hand = here.hands[0]
        hand.segment.used_bytes = hand.segment.payload_bytes
        with pytest.raises(MemoryFull):
            here.dispatch.check_room()
        hand.segment.used_bytes = 0
        for number in range(LINK_SLOT_COUNT + 1):
            hand.worker.outbox.send(Submission(SubmissionKind.RECLAIM, block=number))
        with pytest.raises(QueueFull):
            here.dispatch.check_room()
        hand.taken()


@on_loop
async def test_a_worker_whose_segment_is_full_is_the_last_choice() -> None:
    async with scene(workers=2) as here:
        here.hands[0].segment.used_bytes = here.hands[0].segment.payload_bytes
        assert places([here.submit(f"key {number}") for number in range(3)]) == [1, 1, 1]
        here.hands[0].segment.used_bytes = 0
