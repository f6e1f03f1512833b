"""app.leases: who may read which block, and until when."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from app.errors import HandleAttached
from app.leases import Holder, Leases
from app.segments import Block
from shm.arena import InputArena
from shm.errors import LeaseRefused, StaleHandle
from shm.layout import CompletionKind
from shm.messages import Attach
from tests.app.support import (
    HandWorker,
    attempt_of,
    hand_workers,
    make_job,
    on_loop,
    record_of,
    small_arena,
    until,
)

FOR_EVER_S = 3600.0


@dataclass
class Scene:
    """Leases over the blocks of one worker that is played by hand."""

    hand: HandWorker
    leases: Leases
    unleased: list[Block]
    arena: InputArena

    def block(self, *, ended: bool = True) -> Block:
        """A block of one page of rows and one of metadata, READY as far as control knows if it has ended."""
        filling = self.hand.fill()
        attempt = attempt_of(self.hand, make_job(self.arena, "key", b"item"))
        block = self.hand.segment.admit(record_of(CompletionKind.SHAPE_KNOWN, 1, filling), attempt)
        if ended:
            block.attempt = None
        return block


@asynccontextmanager
async def scene(*, unattached_s: float = FOR_EVER_S, cap_bytes: int = 1 << 20) -> AsyncIterator[Scene]:
    unleased: list[Block] = []
    leases = Leases(unattached_s=unattached_s, session_cap_bytes=cap_bytes, on_unleased=unleased.append)
    async with hand_workers() as (_, [hand]):
        with small_arena() as arena:
            yield Scene(hand, leases, unleased, arena)
        leases.close()


def attach_request(nonce: str, block: Block) -> Attach:
    return Attach(nonce, block.segment.place, block.segment.epoch, block.index, block.generation)


@on_loop
async def test_a_lease_is_attached_once_and_by_one_session() -> None:
    async with scene() as here:
        block = here.block()
        request = attach_request(here.leases.grant(block), block)
        here.leases.attach(Holder(), request)
        with pytest.raises(StaleHandle):
            here.leases.attach(Holder(), request)


@on_loop
async def test_every_grant_is_a_lease_of_its_own() -> None:
    async with scene() as here:
        block = here.block()
        first, second = here.leases.grant(block), here.leases.grant(block)
        assert first != second
        assert here.leases.release(first)
        assert here.unleased == []
        assert here.leases.release(second)
        assert here.unleased == [block]


@pytest.mark.parametrize("field", ["segment", "epoch", "block", "generation"])
@pytest.mark.parametrize("step", [-1, 1])
@on_loop
async def test_an_altered_handle_is_stale(field: str, step: int) -> None:
    async with scene() as here:
        block = here.block()
        request = attach_request(here.leases.grant(block), block)
        altered = msgspec.structs.replace(request, **{field: getattr(request, field) + step})
        with pytest.raises(StaleHandle):
            here.leases.attach(Holder(), altered)


@on_loop
async def test_a_guessed_or_strange_nonce_is_stale() -> None:
    async with scene() as here:
        block = here.block()
        here.leases.grant(block)
        for nonce in ("", "0" * 32, "\ud800", "x" * 60_000):
            with pytest.raises(StaleHandle):
                here.leases.attach(Holder(), attach_request(nonce, block))
            assert not here.leases.release(nonce)


@on_loop
async def test_the_clock_ends_a_lease_that_nobody_attached() -> None:
    async with scene(unattached_s=0.01) as here:
        block = here.block()
        nonce = here.leases.grant(block)
        await until(lambda: here.unleased)
        assert here.unleased == [block]
        assert not here.leases.release(nonce)
        assert here.leases.statistics().expired == 1


@on_loop
async def test_the_clock_never_ends_an_attached_lease() -> None:
    async with scene(unattached_s=0.01) as here:
        kept, left = here.block(), here.block()
        here.leases.attach(Holder(), attach_request(here.leases.grant(kept), kept))
        here.leases.grant(left)
        await until(lambda: here.unleased)
        assert here.unleased == [left]
        assert here.leases.statistics().attached == 1


@on_loop
async def test_the_clock_starts_when_the_block_has_ended() -> None:
    async with scene(unattached_s=0.0) as here:
        block = here.block(ended=False)
        other = here.block()
        here.leases.grant(block)
        here.leases.grant(other)
        await until(lambda: here.unleased)
        assert here.unleased == [other]
        block.attempt = None
        here.leases.block_ended(block)
        await until(lambda: len(here.unleased) == 2)


@on_loop
async def test_a_block_that_ends_without_a_lease_goes_back_at_once() -> None:
    async with scene() as here:
        block = here.block()
        here.leases.block_ended(block)
        assert here.unleased == [block]


@on_loop
async def test_an_attached_lease_is_the_sessions_to_end() -> None:
    async with scene() as here:
        block = here.block()
        holder = Holder()
        nonce = here.leases.grant(block)
        lease = here.leases.attach(holder, attach_request(nonce, block))
        with pytest.raises(HandleAttached):
            here.leases.release(nonce)
        assert here.unleased == []
        assert here.leases.release_held(holder, lease.number)
        assert here.unleased == [block]
        assert not here.leases.release(nonce)


@on_loop
async def test_a_session_may_hold_one_block_of_any_size_and_then_its_cap() -> None:
    async with scene(cap_bytes=1) as here:
        first, second = here.block(), here.block()
        holder = Holder()
        lease = here.leases.attach(holder, attach_request(here.leases.grant(first), first))
        request = attach_request(here.leases.grant(second), second)
        with pytest.raises(LeaseRefused):
            here.leases.attach(holder, request)
        assert here.leases.release_held(holder, lease.number)
        assert here.leases.attach(holder, request).block is second


@on_loop
async def test_a_session_cannot_release_what_another_holds() -> None:
    async with scene() as here:
        block = here.block()
        lease = here.leases.attach(Holder(), attach_request(here.leases.grant(block), block))
        assert not here.leases.release_held(Holder(), lease.number)
        assert here.unleased == []


@on_loop
async def test_the_end_of_a_session_ends_all_its_leases() -> None:
    async with scene() as here:
        blocks = [here.block() for _ in range(3)]
        holder = Holder()
        for block in blocks:
            here.leases.attach(holder, attach_request(here.leases.grant(block), block))
        here.leases.end_holder(holder)
        assert here.unleased == blocks
        assert here.leases.statistics().attached == 0


@on_loop
async def test_a_lease_granted_to_a_session_is_its_own_from_the_start() -> None:
    async with scene() as at:
        holder, block = Holder(), at.block()
        lease = at.leases.grant_held(holder, block)
        assert (at.leases.statistics().attached, at.leases.statistics().unattached) == (1, 0)
        assert at.leases.release_held(holder, lease.number)
        assert at.unleased == [block]
        assert holder.held_bytes == 0


@on_loop
async def test_a_lease_over_the_sessions_cap_is_not_granted() -> None:
    async with scene(cap_bytes=1) as at:
        holder, first, second = Holder(), at.block(), at.block()
        at.leases.grant_held(holder, first)  # one block is always allowed
        with pytest.raises(LeaseRefused):
            at.leases.grant_held(holder, second)
        at.leases.block_ended(second)
        assert at.unleased == [second]
        at.leases.end_holder(holder)
        assert at.unleased == [second, first]
