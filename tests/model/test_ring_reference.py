"""The C ring against the ring in plain Python: any sequence of operations, results and shared words alike."""

import mmap
import os
import struct

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shm import _core
from tests.model.ring_reference import RingReference

_ENDS = st.sampled_from(["producer", "consumer"])


class RingAgainstReference(RuleBasedStateMachine):
    """One ring between two mappings, driven in step with the reference."""

    @initialize(
        slot_count=st.sampled_from([1, 2, 4, 8]),
        has_eventfd=st.booleans(),
        read_only=st.booleans(),
        start=st.sampled_from([0, 3, 2**63 - 2, 2**64 - 3]),
    )
    def build(self, slot_count: int, has_eventfd: bool, read_only: bool, start: int) -> None:
        """start: where both cursors stand at the beginning, as in a ring that has run for long."""
        self.read_only = read_only and has_eventfd
        self.slot_count = slot_count
        self.start = start
        self.bell = os.eventfd(0, os.EFD_NONBLOCK) if has_eventfd else -1
        self.file = os.memfd_create("ring")
        self.consumer_offset = mmap.PAGESIZE
        os.ftruncate(self.file, 2 * mmap.PAGESIZE)
        self.consumer_map = mmap.mmap(self.file, 0)
        self.producer_map = mmap.mmap(self.file, 0)
        self.peer_map = mmap.mmap(self.file, 0, access=mmap.ACCESS_READ if self.read_only else 0)
        _core.word_store(self.producer_map, 0, start)
        _core.word_store(self.consumer_map, self.consumer_offset, start)
        self.reference = RingReference(slot_count, has_eventfd, producer_may_disarm=not self.read_only)
        self.producer, self.consumer = self.new_producer(), self.new_consumer()

    @rule(end=_ENDS)
    def replace_end(self, end: str) -> None:
        """A successor goes on where the shared cursor stands."""
        if end == "producer":
            self.producer.close()
            self.producer = self.new_producer()
        else:
            self.consumer.close()
            self.consumer = self.new_consumer()
            self.reference.woken = False  # private to the end that is gone

    def new_producer(self) -> _core.Producer:
        return _core.Producer(
            self.producer_map, 0, self.peer_map, self.consumer_offset, self.slot_count, self.bell
        )

    def new_consumer(self) -> _core.Consumer:
        return _core.Consumer(self.producer_map, 0, self.consumer_map, self.consumer_offset, self.slot_count)

    @rule(descriptor=st.binary(max_size=_core.SLOT_BYTES))
    def publish(self, descriptor: bytes) -> None:
        assert self.producer.try_publish(descriptor) == self.reference.try_publish(descriptor)

    @rule()
    def ring(self) -> None:
        self.producer.ring()
        self.reference.ring()

    @rule()
    def try_take(self) -> None:
        assert self.consumer.try_take() == self.reference.try_take()

    @rule(spin_ns=st.sampled_from([0, 1_000]))
    def take_and_give_up(self, spin_ns: int) -> None:
        assert self.consumer.take(1, spin_ns) == self.reference.take_and_give_up()

    @rule()
    def take_without_waiting(self) -> None:
        assert self.consumer.take(0) == self.reference.try_take()

    @rule()
    def arm(self) -> None:
        assert self.consumer.arm() == self.reference.arm()

    @rule()
    def disarm(self) -> None:
        self.consumer.disarm()
        self.reference.disarm()

    @rule()
    def wake(self) -> None:
        self.consumer.wake()
        self.reference.wake()

    @invariant()
    def the_counts_agree(self) -> None:
        assert self.producer.free_slots() == self.reference.free_slots()
        assert self.consumer.pending() == self.reference.pending()
        assert self.producer.published == (self.start + self.reference.tail) % 2**64
        assert self.consumer.taken == (self.start + self.reference.head) % 2**64

    @invariant()
    def the_shared_words_agree(self) -> None:
        assert _core.word_load(self.producer_map, 0) == (self.start + self.reference.tail) % 2**64
        head, armed = struct.unpack_from("<Q120xI", self.consumer_map, self.consumer_offset)
        assert head == (self.start + self.reference.head) % 2**64
        assert armed == self.reference.armed

    @invariant()
    def the_bell_was_rung_as_often(self) -> None:
        if self.bell < 0:
            return
        try:
            rung = os.eventfd_read(self.bell)
        except BlockingIOError:
            rung = 0
        assert rung == self.reference.bell_count
        self.reference.bell_count = 0

    def teardown(self) -> None:
        if not hasattr(self, "file"):
            return
        self.producer.close()
        self.consumer.close()
        for mapping in (self.producer_map, self.consumer_map, self.peer_map):
            mapping.close()
        for descriptor in (self.file, self.bell):
            if descriptor >= 0:
                os.close(descriptor)


TestTheRingInCAgreesWithTheRingInPython = RingAgainstReference.TestCase
TestTheRingInCAgreesWithTheRingInPython.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
