"""The ring in plain Python: what shm._core's Producer and Consumer do, without memory orders.

It is the reference that test_ring_reference.py compares the C extension with, operation by operation. It
is no fall-back: Python has no fences, so two processes cannot share this.
"""

from dataclasses import dataclass, field
from enum import IntEnum

SLOT_BYTES = 128


class Bell(IntEnum):
    """What the armed word holds."""

    DISARMED = 0
    ARMED = 1
    RUNG = 2  # rung without a message


@dataclass
class RingReference:
    """Both ends of one ring. bell_count: what an eventfd bell has counted since it was last read."""

    slot_count: int
    has_eventfd: bool
    producer_may_disarm: bool = True
    tail: int = 0
    head: int = 0
    armed: Bell = Bell.DISARMED
    woken: bool = False
    bell_count: int = 0
    slots: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [bytes(SLOT_BYTES)] * self.slot_count

    # --- the producer's end ---
    def try_publish(self, descriptor: bytes) -> bool:
        """Fill the slot at tail, advance tail, ring if armed. False when full."""
        if self.free_slots() == 0:
            return False
        self.slots[self.tail & (self.slot_count - 1)] = descriptor.ljust(SLOT_BYTES, b"\0")
        self.tail += 1
        if self.armed is Bell.ARMED:
            if self.producer_may_disarm:
                self.armed = Bell.DISARMED
            if self.has_eventfd:
                self.bell_count += 1
        return True

    def ring(self) -> None:
        """Ring without a message: whether or not the consumer is armed."""
        if self.has_eventfd:
            self.bell_count += 1
        else:
            self.armed = Bell.RUNG

    def free_slots(self) -> int:
        """Messages that fit now."""
        return self.slot_count - self.pending()

    # --- the consumer's end ---
    def try_take(self) -> bytes | None:
        """The slot at head, always 128 bytes. None when empty."""
        if self.pending() == 0:
            return None
        descriptor = self.slots[self.head & (self.slot_count - 1)]
        self.head += 1
        return descriptor

    def take_and_give_up(self) -> bytes | None:
        """take, its time over at once: armed and disarmed on the way, a ring without a message used up."""
        if self.pending() == 0:
            self.disarm()
            self.woken = False
        return self.try_take()

    def arm(self) -> bool:
        """True: armed, and nothing is there. A message or a ring without one refuses, and disarms."""
        rung = False
        if self.pending() == 0:
            rung = self.woken or self.armed is Bell.RUNG
            self.woken = False
        self.armed = Bell.DISARMED if self.pending() or rung else Bell.ARMED
        return self.armed is Bell.ARMED

    def disarm(self) -> None:
        """Awake."""
        self.armed = Bell.DISARMED

    def wake(self) -> None:
        """From another thread: the next take or arm comes back."""
        self.woken = True
        self.armed = Bell.RUNG

    def pending(self) -> int:
        """Messages published and not taken."""
        return self.tail - self.head
