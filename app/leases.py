"""Who may read which block, and until when. Private memory of control; a reader knows only its nonce.

A lease is granted to a handle's nonce (`app.completions`), moved to a session by attach (`app.sessions`),
and ended by release, by its session's end, or, while no session has it, by the clock: 60 s after its block
was READY or FAILED. An encode that came over a session has its lease there from the start, without a nonce.
When the last lease of a block ends, `on_unleased` is told, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

from app.errors import HandleAttached
from shm.errors import LeaseRefused, StaleHandle

if TYPE_CHECKING:
    from app.segments import Block
    from shm.messages import Attach

EXPIRE_MAX = 256  # leases ended by the clock before the event loop has its turn again
TOGETHER_S = 0.05  # the clock ends a lease so much later, with those that came after it: one wake of a worker


@dataclass(slots=True, eq=False)
class Lease:
    """A right to read a block. number is what a session calls it; holder is None until one has attached.

    key is the digest of its nonce, None if it never had one.
    """

    number: int
    key: bytes | None
    block: Block
    holder: Holder | None = None
    expires_ns: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """One session's leases by number. `app.sessions` keeps it, only Leases changes it. pid: its reader's."""

    pid: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """Counts of leases; expired counts those that the clock ended since the start."""

    attached: int
    unattached: int
    expired: int


class Leases:
    """Every lease by its number, the digest of its nonce, its block, and (attached ones) by its holder."""

    def __init__(self, *, unattached_s: float, session_cap_bytes: int, on_unleased: Callable[[Block], None]):
        """A session may hold session_cap_bytes of runs, or one block of any size."""
        self._unattached_ns = int(unattached_s * 1e9)
        self._session_cap_bytes = session_cap_bytes
        self._on_unleased = on_unleased
        self._numbers = count(1)
        self._all: dict[int, Lease] = {}
        self._by_key: dict[bytes, Lease] = {}
        self._by_block: dict[Block, set[Lease]] = {}
        # Unattached leases whose clock runs, soonest first: all run equally long.
        self._expiring: OrderedDict[int, Lease] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._expired = 0

    def grant(self, block: Block) -> str:
        """A new lease on block; returns its nonce, 128 random bits in hexadecimal.

        Its clock starts now if the block has ended already, else with `block_ended`.
        """
        nonce = secrets.token_hex(16)
        key = _key(nonce)
        lease = self._new(block, key)
        self._by_key[key] = lease
        if block.attempt is None:
            self._start_clock(lease)
        return nonce

    def grant_beside(self, nonce: str) -> str:
        """One more lease on the block of a living lease; returns its nonce. StaleHandle if there is none."""
        lease = self._by_key.get(_key(nonce))
        if lease is None:
            raise StaleHandle("no such lease")
        return self.grant(lease.block)

    def attach(self, holder: Holder, request: Attach) -> Lease:
        """Move a handle's lease to a session. StaleHandle if there is no such lease to move,
        LeaseRefused if the session holds its cap."""
        lease = self._by_key.get(_key(request.nonce))
        if lease is None or lease.holder is not None or not _names(request, lease.block):
            raise StaleHandle("no such lease")
        self._check_cap(holder, lease.block)
        self._expiring.pop(lease.number, None)
        self._hold(holder, lease)
        return lease

    def grant_held(self, holder: Holder, block: Block) -> Lease:
        """A new lease on block that is a session's from the start. LeaseRefused if it holds its cap."""
        self._check_cap(holder, block)
        lease = self._new(block, None)
        self._hold(holder, lease)
        return lease

    def release(self, nonce: str) -> bool:
        """End the unattached lease of this nonce. False if there is none; HandleAttached if a session has it:
        then it is the session's to end, which may be reading."""
        lease = self._by_key.get(_key(nonce))
        if lease is None:
            return False
        if lease.holder is not None:
            raise HandleAttached(
                "a session has attached this handle; its release, or its end, ends the lease"
            )
        self._end(lease)
        return True

    def release_held(self, holder: Holder, number: int) -> bool:
        """End one of a session's own leases. False if it has none of this number."""
        lease = holder.leases.get(number)
        if lease is None:
            return False
        self._end(lease)
        return True

    def end_holder(self, holder: Holder) -> None:
        """The session is gone: end all that it held."""
        for lease in list(holder.leases.values()):
            self._end(lease)

    def block_ended(self, block: Block) -> None:
        """The block is READY or FAILED for good: unattached leases have their time from now on, and a
        block that nobody may read goes back at once."""
        leases = self._by_block.get(block)
        if leases is None:
            self._on_unleased(block)
            return
        for lease in leases:
            if lease.holder is None:
                self._start_clock(lease)

    def readers(self, blocks: Iterable[Block]) -> list[str]:
        """Who may read any of these blocks, in words for a person."""
        holders = {lease.holder for block in blocks for lease in self._by_block.get(block, ())}
        pids = sorted({holder.pid for holder in holders if holder is not None})
        return [f"pid {pid}" for pid in pids] + ["handles that no session has attached"] * (None in holders)

    def close(self) -> None:
        """Forget every lease without telling anyone: what a reader still has mapped stays as it is.

        Called before the sessions end, or their leases would end one by one and be reclaimed.
        """
        if self._timer is not None:
            self._timer.cancel()
        for lease in self._all.values():
            if lease.holder is not None:
                lease.holder.leases.clear()
        self._all.clear()
        self._by_key.clear()
        self._by_block.clear()
        self._expiring.clear()

    def statistics(self) -> LeaseStatistics:
        """Counts, now."""
        attached = sum(lease.holder is not None for lease in self._all.values())
        return LeaseStatistics(attached, len(self._all) - attached, self._expired)

    def _new(self, block: Block, key: bytes | None) -> Lease:
        lease = Lease(next(self._numbers), key, block)
        self._all[lease.number] = lease
        self._by_block.setdefault(block, set()).add(lease)
        return lease

    def _check_cap(self, holder: Holder, block: Block) -> None:
        if holder.leases and holder.held_bytes + block.run_bytes > self._session_cap_bytes:
            raise LeaseRefused("the session holds its cap of leased bytes")

    def _hold(self, holder: Holder, lease: Lease) -> None:
        lease.holder = holder
        holder.leases[lease.number] = lease
        holder.held_bytes += lease.block.run_bytes

    def _end(self, lease: Lease) -> None:
        del self._all[lease.number]
        if lease.key is not None:
            del self._by_key[lease.key]
        self._expiring.pop(lease.number, None)
        if lease.holder is not None:
            del lease.holder.leases[lease.number]
            lease.holder.held_bytes -= lease.block.run_bytes
        others = self._by_block[lease.block]
        others.remove(lease)
        if not others:
            del self._by_block[lease.block]
            self._on_unleased(lease.block)

    def _start_clock(self, lease: Lease) -> None:
        if lease.number in self._expiring:
            return
        lease.expires_ns = time.monotonic_ns() + self._unattached_ns
        self._expiring[lease.number] = lease
        if self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        """For the lease that expires next, if there is one."""
        self._timer = None
        for soonest in self._expiring.values():
            remaining_s = (soonest.expires_ns - time.monotonic_ns()) / 1e9
            delay_s = remaining_s + TOGETHER_S if remaining_s > 0 else 0.0
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)
            return

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for lease in list(islice(self._expiring.values(), EXPIRE_MAX)):
            if lease.expires_ns > now_ns:
                break
            self._expired += 1
            self._end(lease)
        self._set_timer()


def _key(nonce: str) -> bytes:
    # Looked up by digest: how long the look-up takes says nothing about the nonce.
    return hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()


def _names(request: Attach, block: Block) -> bool:
    """Whether the handle speaks of this very block."""
    segment = block.segment
    return (request.segment, request.epoch, request.block, request.generation) == (
        segment.place, segment.epoch, block.index, block.generation,
    )  # fmt: skip
