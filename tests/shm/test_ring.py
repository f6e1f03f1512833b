"""The ring: order, full, empty, resuming, and peers that die or lie."""

import mmap
import os
import struct

import pytest

from shm._core import Consumer, Producer
from shm.errors import RegionCorrupt
from tests.shm.processes import A_LONG_TIME_NS, RingMemory, forked

SLOT_COUNT = 4


@pytest.fixture
def ring() -> RingMemory:
    return RingMemory(SLOT_COUNT)


def store_word(ring: RingMemory, offset: int, value: int) -> None:
    ring.memory[offset : offset + 8] = value.to_bytes(8, "little")


def load_word(ring: RingMemory, offset: int) -> int:
    return int.from_bytes(ring.memory[offset : offset + 8], "little")


def numbered(number: int) -> bytes:
    """A descriptor whose every word is its number: a torn one shows."""
    return struct.pack("<16Q", *[number] * 16)


def number_of(slot: bytes) -> int:
    """The number of an untorn descriptor."""
    words = set(struct.unpack("<16Q", slot))
    assert len(words) == 1
    return int(words.pop())


def test_messages_arrive_in_order_and_zero_padded(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert consumer.try_take() is None
    assert producer.try_publish(b"one")
    assert producer.try_publish(b"")
    assert producer.try_publish(bytes(range(128)))
    assert consumer.pending() == 3
    assert consumer.try_take() == b"one" + bytes(125)
    assert consumer.try_take() == bytes(128)
    assert consumer.try_take() == bytes(range(128))
    assert consumer.try_take() is None


def test_a_short_descriptor_leaves_nothing_of_the_slots_last_one(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    for _ in range(SLOT_COUNT):
        producer.try_publish(b"\xff" * 128)
        consumer.try_take()
    producer.try_publish(b"x")
    assert consumer.try_take() == b"x" + bytes(127)


def test_a_full_ring_refuses_and_recovers(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert [producer.try_publish(numbered(n)) for n in range(SLOT_COUNT + 1)] == [True] * SLOT_COUNT + [False]
    assert producer.free_slots() == 0
    assert consumer.try_take() == numbered(0)
    assert producer.free_slots() == 1
    assert producer.try_publish(numbered(SLOT_COUNT))
    assert not producer.try_publish(numbered(99))
    assert [consumer.try_take() for _ in range(SLOT_COUNT)] == [numbered(n) for n in range(1, SLOT_COUNT + 1)]


def test_a_ring_of_one_slot_works() -> None:
    ring = RingMemory(1)
    producer, consumer = ring.producer(), ring.consumer()
    for number in range(5):
        assert producer.try_publish(numbered(number))
        assert not producer.try_publish(b"")
        assert consumer.try_take() == numbered(number)


def test_the_cursors_lie_where_the_layout_says(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_publish(b"first")
    producer.try_publish(b"second")
    consumer.try_take()
    assert (load_word(ring, 0), load_word(ring, ring.producer_offset)) == (1, 2)
    assert (consumer.taken, producer.published) == (1, 2)
    assert ring.memory[ring.producer_offset + 128 :][:5] == b"first"
    assert ring.memory[ring.producer_offset + 256 :][:6] == b"second"


def test_the_cursors_pass_the_end_of_64_bits(ring: RingMemory) -> None:
    store_word(ring, 0, 2**64 - 2)
    store_word(ring, ring.producer_offset, 2**64 - 2)
    producer, consumer = ring.producer(), ring.consumer()
    for number in range(10):
        assert producer.try_publish(numbered(number))
        assert consumer.try_take() == numbered(number)
    assert producer.published == 8


def test_new_ends_resume_where_the_old_ones_stopped(ring: RingMemory) -> None:
    first = ring.producer()
    assert all(first.try_publish(numbered(n)) for n in range(3))
    assert ring.consumer().try_take() == numbered(0)
    second = ring.producer()
    assert second.published == 3
    assert second.try_publish(numbered(3))
    heir = ring.consumer()
    assert heir.taken == 1
    assert [heir.try_take() for _ in range(4)] == [numbered(1), numbered(2), numbered(3), None]


@pytest.mark.parametrize("tail", [SLOT_COUNT + 1, 2**63, 2**64 - 1])
def test_an_impossible_tail_is_region_corrupt(ring: RingMemory, tail: int) -> None:
    consumer = ring.consumer()
    store_word(ring, ring.producer_offset, tail)
    with pytest.raises(RegionCorrupt):
        consumer.try_take()
    with pytest.raises(RegionCorrupt):
        consumer.pending()
    with pytest.raises(RegionCorrupt):
        consumer.arm()
    with pytest.raises(RegionCorrupt):
        consumer.take(A_LONG_TIME_NS)
    assert ring.armed == 0


@pytest.mark.parametrize("head", [1, 2**63, 2**64 - SLOT_COUNT - 1])
def test_an_impossible_head_is_region_corrupt(ring: RingMemory, head: int) -> None:
    producer = ring.producer()
    store_word(ring, 0, head)
    with pytest.raises(RegionCorrupt):
        producer.try_publish(b"")
    with pytest.raises(RegionCorrupt):
        producer.free_slots()


def test_a_tail_that_goes_back_is_region_corrupt(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_publish(b"")
    consumer.try_take()
    store_word(ring, ring.producer_offset, 0)
    with pytest.raises(RegionCorrupt):
        consumer.try_take()


@pytest.mark.parametrize("slot_count", [0, 3, 6, 2**32, 2**63])
def test_a_slot_count_that_is_no_power_of_two_or_too_large_is_refused(
    ring: RingMemory, slot_count: int
) -> None:
    with pytest.raises(ValueError, match=r"slot_count|not inside"):
        Producer(ring.memory, 256, ring.memory, 0, slot_count)


@pytest.mark.parametrize(
    ("producer_offset", "consumer_offset"), [(-1, 0), (256, -1), (264, 0), (256, 2**40), (2**70, 0), (256, 4)]
)
def test_a_side_outside_its_buffer_or_unaligned_is_refused(
    ring: RingMemory, producer_offset: int, consumer_offset: int
) -> None:
    with pytest.raises(ValueError, match=r"offset|inside|aligned"):
        Producer(ring.memory, producer_offset, ring.memory, consumer_offset, SLOT_COUNT)
    with pytest.raises(ValueError, match=r"offset|inside|aligned"):
        Consumer(ring.memory, producer_offset, ring.memory, consumer_offset, SLOT_COUNT)
    ring.memory.close()  # nothing holds it


def test_each_end_needs_its_own_side_writable(ring: RingMemory) -> None:
    read_only = memoryview(ring.memory).toreadonly()
    with pytest.raises(BufferError):
        Producer(read_only, 256, ring.memory, 0, SLOT_COUNT)
    with pytest.raises(BufferError):
        Consumer(ring.memory, 256, read_only, 0, SLOT_COUNT)
    with pytest.raises(ValueError, match="eventfd"):
        Producer(ring.memory, 256, read_only, 0, SLOT_COUNT)


def test_a_descriptor_longer_than_a_slot_is_refused(ring: RingMemory) -> None:
    with pytest.raises(ValueError, match="128"):
        ring.producer().try_publish(bytes(129))


def test_close_gives_the_buffers_back_and_ends_all_use(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    with pytest.raises(BufferError):
        ring.memory.close()
    for end in (producer, consumer):
        end.close()
        end.close()
    ring.memory.close()
    for use in (
        lambda: producer.try_publish(b""),
        producer.ring,
        producer.free_slots,
        lambda: producer.published,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()
    for refused in (
        consumer.try_take,
        lambda: consumer.take(0),
        consumer.arm,
        consumer.disarm,
        consumer.wake,
        consumer.pending,
        lambda: consumer.taken,
    ):
        with pytest.raises(ValueError, match="closed"):
            refused()


def test_a_dropped_end_gives_its_buffers_back(ring: RingMemory) -> None:
    ring.producer()
    ring.consumer()
    ring.memory.close()


def test_the_two_sides_may_lie_in_different_regions(ring: RingMemory) -> None:
    other = mmap.mmap(-1, 4096)
    producer = Producer(ring.memory, 256, other, 128, SLOT_COUNT)
    consumer = Consumer(ring.memory, 256, other, 128, SLOT_COUNT)
    assert producer.try_publish(b"over")
    assert consumer.try_take() == b"over" + bytes(124)
    assert (load_word(ring, 0), other[128]) == (0, 1)


def publish_for_ever(ring: RingMemory) -> None:
    producer = ring.producer()
    while True:
        if not producer.try_publish(numbered(producer.published)):
            os.sched_yield()


def take_for_ever(ring: RingMemory) -> None:
    consumer = ring.consumer()
    while True:
        expected = consumer.taken
        message = consumer.take(A_LONG_TIME_NS)
        assert message is not None
        assert number_of(message) == expected


def test_producers_killed_while_publishing_leave_the_consumer_an_unbroken_sequence(ring: RingMemory) -> None:
    consumer = ring.consumer()
    for takes in range(1, 31):
        with forked(lambda: publish_for_ever(ring)) as child:
            for _ in range(takes * 7):
                expected = consumer.taken
                message = consumer.take(A_LONG_TIME_NS)
                assert message is not None
                assert number_of(message) == expected
            child.kill()
        while (message := consumer.try_take()) is not None:
            assert number_of(message) == consumer.taken - 1
    assert ring.producer().free_slots() == SLOT_COUNT


def test_what_a_dead_producer_did_not_publish_never_existed(ring: RingMemory) -> None:
    def die_between_the_slot_and_the_tail() -> None:
        ring.producer().try_publish(numbered(0))
        ring.memory[ring.producer_offset + 256 : ring.producer_offset + 384] = b"\xee" * 128
        os.kill(os.getpid(), 9)

    with forked(die_between_the_slot_and_the_tail) as child:
        assert child.wait() == -9
    consumer = ring.consumer()
    assert (consumer.try_take(), consumer.try_take()) == (numbered(0), None)
    assert ring.producer().try_publish(numbered(1))
    assert consumer.try_take() == numbered(1)


def test_consumers_killed_while_taking_leave_a_ring_that_goes_on(ring: RingMemory) -> None:
    producer = ring.producer()
    for messages in range(1, 31):
        with forked(lambda: take_for_ever(ring)) as child:
            for _ in range(messages * 7):
                while not producer.try_publish(numbered(producer.published)):
                    os.sched_yield()
            child.kill()
    heir = ring.consumer()
    while (message := heir.try_take()) is not None:
        assert number_of(message) == heir.taken - 1
    assert producer.free_slots() == SLOT_COUNT


def run_of(*numbers: int) -> bytes:
    """Whole descriptors, one behind the other."""
    return b"".join(numbered(number) for number in numbers)


def test_many_messages_are_published_and_taken_together(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert consumer.take_many(SLOT_COUNT, 0) == b""
    for first in range(0, 30, 3):  # around the end of the slots
        assert producer.try_publish_many(run_of(first, first + 1, first + 2)) == 3
        assert consumer.take_many(2, A_LONG_TIME_NS) == run_of(first, first + 1)
        assert consumer.take_many(2, A_LONG_TIME_NS) == run_of(first + 2)
    assert (producer.published, consumer.taken) == (30, 30)


def test_one_and_many_may_be_mixed_at_both_ends(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    for first in range(0, 40, 4):
        producer.try_publish(numbered(first))
        assert producer.try_publish_many(run_of(first + 1, first + 2)) == 2
        assert consumer.try_take() == numbered(first)
        producer.try_publish(numbered(first + 3))
        assert consumer.take_many(2, 0) == run_of(first + 1, first + 2)
        assert consumer.try_take() == numbered(first + 3)
        assert consumer.try_take() is None


def test_of_many_messages_those_are_published_that_there_is_room_for(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_publish(numbered(0))
    assert producer.try_publish_many(run_of(1, 2, 3, 4, 5)) == SLOT_COUNT - 1
    assert producer.try_publish_many(run_of(6)) == 0
    assert consumer.take_many(99, 0) == run_of(0, 1, 2, 3)
    assert producer.try_publish_many(run_of(6)) == 1


def test_many_messages_ring_a_sleeper_once(ring: RingMemory) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    producer, consumer = ring.producer(bell), ring.consumer()
    assert consumer.arm()
    producer.try_publish_many(run_of(1, 2))
    producer.try_publish_many(run_of(3))
    assert os.eventfd_read(bell) == 1
    os.close(bell)


def test_a_take_of_many_sleeps_until_the_first_is_there(ring: RingMemory) -> None:
    with forked(lambda: ring.producer().try_publish_many(run_of(7, 8))):
        taken = ring.consumer().take_many(SLOT_COUNT, A_LONG_TIME_NS)
    assert taken[:128] == numbered(7)


@pytest.mark.parametrize("nbytes", [0, 1, 127, 129])
def test_what_is_no_run_of_whole_descriptors_is_refused(ring: RingMemory, nbytes: int) -> None:
    with pytest.raises(ValueError, match="128 bytes each"):
        ring.producer().try_publish_many(bytes(nbytes))


def test_nothing_is_published_or_taken_together_past_an_impossible_cursor(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    store_word(ring, 0, 99)
    store_word(ring, ring.producer_offset, 99)
    with pytest.raises(RegionCorrupt):
        producer.try_publish_many(run_of(1))
    with pytest.raises(RegionCorrupt):
        consumer.take_many(1, 0)
