"""app.outbox: what control says to a worker is never lost and never blocks."""

from app.worker import LINK_SLOT_COUNT
from shm.layout import Submission, SubmissionKind, link_submission_offsets
from tests.app.support import hand_workers, on_loop


@on_loop
async def test_orders_wait_for_room_and_keep_their_order() -> None:
    async with hand_workers() as (_, [hand]):
        outbox = hand.worker.outbox
        for number in range(LINK_SLOT_COUNT + 2):
            outbox.send(Submission(SubmissionKind.RECLAIM, block=number))
        assert outbox.backlog == 2
        assert not outbox.try_publish(Submission(SubmissionKind.ENCODE))
        taken = hand.taken()
        assert outbox.try_publish(Submission(SubmissionKind.ENCODE))
        taken += hand.taken()
        assert [order.block for order in taken[:-1]] == list(range(LINK_SLOT_COUNT + 2))
        assert taken[-1].kind is SubmissionKind.ENCODE


@on_loop
async def test_an_impossible_cursor_is_the_workers_end_and_not_ours() -> None:
    async with hand_workers() as (_, [hand]):
        _, consumer_side = link_submission_offsets()
        hand.store_link_word(consumer_side, 1 << 60)
        for number in range(LINK_SLOT_COUNT + 1):
            hand.worker.outbox.send(Submission(SubmissionKind.RECLAIM, block=number))
        hand.worker.outbox.flush()
        assert not hand.worker.is_trusted
        assert hand.worker.outbox.backlog > 0
