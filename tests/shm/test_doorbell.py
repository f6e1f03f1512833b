"""The doorbell: armed, rung, woken, interrupted; and no wake-up lost between two processes."""

import mmap
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from shm._core import Consumer, Producer
from tests.shm.processes import A_LONG_TIME_NS, RingMemory, forked

HAMMER_MESSAGES = 200_000
SLOT_COUNT = 4


@pytest.fixture
def ring() -> RingMemory:
    return RingMemory(SLOT_COUNT)


@pytest.fixture
def bell() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_an_empty_ring_arms_and_a_filled_one_does_not(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert consumer.arm()
    assert ring.armed == 1
    consumer.disarm()
    assert ring.armed == 0
    producer.try_publish(b"")
    assert not consumer.arm()
    assert ring.armed == 0


def test_publishing_rings_an_armed_consumer_once(ring: RingMemory, bell: int) -> None:
    producer, consumer = ring.producer(bell), ring.consumer()
    producer.try_publish(b"")
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell)
    consumer.try_take()
    assert consumer.arm()
    producer.try_publish(b"")
    producer.try_publish(b"")
    assert os.eventfd_read(bell) == 1
    assert ring.armed == 0


def test_a_producer_with_a_read_only_view_rings_until_the_consumer_disarms(bell: int) -> None:
    with memfd_ring() as (producer_memory, consumer_memory, read_only):
        producer = Producer(producer_memory, 128, read_only, 128, SLOT_COUNT, bell)
        consumer = Consumer(producer_memory, 128, consumer_memory, 128, SLOT_COUNT)
        assert consumer.arm()
        producer.try_publish(b"")
        producer.try_publish(b"")
        assert os.eventfd_read(bell) == 2
        consumer.disarm()
        producer.try_publish(b"")
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)
        producer.close()
        consumer.close()


def test_a_broken_bell_is_an_os_error_after_the_message_was_published(ring: RingMemory) -> None:
    producer, consumer = ring.producer(2**30), ring.consumer()
    assert consumer.arm()
    with pytest.raises(OSError, match="Bad file descriptor"):
        producer.try_publish(b"there")
    assert consumer.try_take() == b"there" + bytes(123)


def test_a_full_eventfd_counts_as_rung(ring: RingMemory, bell: int) -> None:
    os.eventfd_write(bell, 2**64 - 2)
    producer, consumer = ring.producer(bell), ring.consumer()
    assert consumer.arm()
    assert producer.try_publish(b"")


def test_take_returns_none_at_the_timeout(ring: RingMemory) -> None:
    consumer = ring.consumer()
    assert consumer.take(0) is None
    assert consumer.take(-1) is None
    assert consumer.take(1_000_000) is None
    assert consumer.take(1_000_000, 10_000_000) is None
    assert ring.armed == 0


def test_take_sleeps_without_the_interpreter_lock_until_a_message_comes(
    ring: RingMemory, thread: ThreadPoolExecutor
) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS)
    ring.wait_until_armed()
    ring.producer().try_publish(b"now")
    assert taking.result() == b"now" + bytes(125)
    assert ring.armed == 0


def test_take_finds_a_message_while_spinning(ring: RingMemory, thread: ThreadPoolExecutor) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS, A_LONG_TIME_NS)
    ring.producer().try_publish(b"")
    assert taking.result() == bytes(128)


def test_ring_wakes_a_sleeping_take_without_a_message(ring: RingMemory, thread: ThreadPoolExecutor) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS)
    ring.wait_until_armed()
    ring.producer().ring()
    assert taking.result() is None
    assert ring.armed == 0


def test_a_ring_before_the_take_is_not_lost(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    producer.ring()
    assert consumer.take(A_LONG_TIME_NS) is None
    producer.ring()
    producer.try_publish(b"")
    assert consumer.take(A_LONG_TIME_NS) == bytes(128)
    assert consumer.take(A_LONG_TIME_NS) is None
    producer.ring()
    assert not consumer.arm()
    assert consumer.arm()


def test_ring_makes_an_eventfd_readable_whether_armed_or_not(ring: RingMemory, bell: int) -> None:
    ring.producer(bell).ring()
    assert os.eventfd_read(bell) == 1


def test_wake_ends_the_take_under_way_or_the_next(ring: RingMemory, thread: ThreadPoolExecutor) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS)
    ring.wait_until_armed()
    consumer.wake()
    assert taking.result() is None
    consumer.wake()
    assert consumer.take(A_LONG_TIME_NS) is None
    assert consumer.arm()


def test_the_bell_of_a_message_that_was_taken_already_does_not_end_a_take(
    ring: RingMemory, thread: ThreadPoolExecutor
) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS)
    ring.wait_until_armed()
    late_bell = RingMemory(SLOT_COUNT)
    # A producer of nothing, ringing on the same consumer side: what a late exchange looks like.
    other = Producer(late_bell.memory, 256, ring.memory, 0, SLOT_COUNT)
    other.try_publish(b"")
    ring.wait_until_armed()
    assert not taking.done()
    ring.producer().try_publish(b"real")
    assert taking.result() == b"real" + bytes(124)


def test_nobody_else_may_use_or_close_a_consumer_that_sleeps_in_take(
    ring: RingMemory, thread: ThreadPoolExecutor
) -> None:
    consumer = ring.consumer()
    taking = thread.submit(consumer.take, A_LONG_TIME_NS)
    ring.wait_until_armed()
    for use in (consumer.close, consumer.try_take, consumer.arm, consumer.disarm, lambda: consumer.take(0)):
        with pytest.raises(RuntimeError, match="another thread"):
            use()
    assert (consumer.pending(), consumer.taken) == (0, 0)
    consumer.wake()
    assert taking.result() is None
    consumer.close()


class HandlerRaised(Exception):
    """Raised by the signal handler of a test."""


@contextmanager
def on_user_signal(ring: RingMemory, handle: "signal._HANDLER") -> Iterator[None]:
    """Signal the main thread once it sleeps in take."""
    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        ring.wait_until_armed()
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_that_raises_ends_take_and_leaves_it_disarmed(ring: RingMemory) -> None:
    def raise_it(*_: object) -> None:
        raise HandlerRaised

    consumer = ring.consumer()
    with on_user_signal(ring, raise_it), pytest.raises(HandlerRaised):
        consumer.take(A_LONG_TIME_NS)
    assert ring.armed == 0
    assert consumer.take(0) is None


def test_a_signal_handler_that_returns_lets_take_go_on(ring: RingMemory) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    with on_user_signal(ring, lambda *_: producer.try_publish(b"from the handler")):
        assert consumer.take(A_LONG_TIME_NS) == b"from the handler".ljust(128, b"\0")


def test_a_consumer_killed_in_its_sleep_costs_the_producer_nothing(ring: RingMemory) -> None:
    with forked(lambda: ring.consumer().take(A_LONG_TIME_NS)) as child:
        ring.wait_until_armed()
        child.kill()
    assert ring.armed == 1
    producer, heir = ring.producer(), ring.consumer()
    assert producer.try_publish(b"")
    assert heir.take(A_LONG_TIME_NS) == bytes(128)


# --- no wake-up is lost ---


@contextmanager
def memfd_ring() -> Iterator[tuple[mmap.mmap, mmap.mmap, mmap.mmap]]:
    """A session's two regions: (producer side, consumer side, the consumer side mapped read-only)."""
    client, control = os.memfd_create("client"), os.memfd_create("control")
    os.ftruncate(client, 4096)
    os.ftruncate(control, 4096)
    with (
        mmap.mmap(client, 4096) as producer_memory,
        mmap.mmap(control, 4096) as consumer_memory,
        mmap.mmap(control, 4096, prot=mmap.PROT_READ) as read_only,
    ):
        os.close(client)
        os.close(control)
        yield producer_memory, consumer_memory, read_only


def publish_numbers(producer: Producer) -> None:
    """All messages, as fast as the consumer lets us. With a slot or two a lost wake-up stops both."""
    for number in range(HAMMER_MESSAGES):
        descriptor = struct.pack("<Q", number)
        while not producer.try_publish(descriptor):
            os.sched_yield()


def take_from_eventfd(consumer: Consumer, bell: int) -> bytes:
    """What an event loop does: take, else arm and wait for the descriptor."""
    poller = select.poll()
    poller.register(bell, select.POLLIN)
    while (message := consumer.try_take()) is None:
        if consumer.arm():
            assert poller.poll(A_LONG_TIME_NS // 1_000_000), "lost wake-up"
            os.eventfd_read(bell)
            consumer.disarm()
    return message


def take_woken(consumer: Consumer, spin_ns: int = 0) -> bytes:
    """A take that was not woken finds the message all the same, at its timeout: that is a lost wake-up."""
    deadline_ns = time.monotonic_ns() + A_LONG_TIME_NS
    message = consumer.take(A_LONG_TIME_NS, spin_ns)
    assert message is not None
    assert time.monotonic_ns() < deadline_ns, "lost wake-up"
    return message


def test_no_wake_up_is_lost_with_a_futex_bell() -> None:
    ring = RingMemory(1)
    consumer = ring.consumer()
    with forked(lambda: publish_numbers(ring.producer())) as child:
        for number in range(HAMMER_MESSAGES):
            # At once, or after a spin, so that the arming moves against the publishing.
            assert struct.unpack_from("<Q", take_woken(consumer, (number % 4) * 500)) == (number,)
        assert child.wait() == 0


def test_no_wake_up_is_lost_with_an_eventfd_bell(bell: int) -> None:
    ring = RingMemory(2)
    consumer = ring.consumer()
    with forked(lambda: publish_numbers(ring.producer(bell))) as child:
        for number in range(HAMMER_MESSAGES):
            assert struct.unpack_from("<Q", take_from_eventfd(consumer, bell)) == (number,)
        assert child.wait() == 0


def test_no_wake_up_is_lost_when_the_producer_may_only_read_armed(bell: int) -> None:
    with memfd_ring() as (producer_memory, consumer_memory, read_only):
        consumer = Consumer(producer_memory, 128, consumer_memory, 128, SLOT_COUNT)

        def publish() -> None:
            publish_numbers(Producer(producer_memory, 128, read_only, 128, SLOT_COUNT, bell))

        with forked(publish) as child:
            for number in range(HAMMER_MESSAGES):
                assert struct.unpack_from("<Q", take_from_eventfd(consumer, bell)) == (number,)
            assert child.wait() == 0
        consumer.close()


def test_no_wake_up_is_lost_between_two_processes_that_answer_each_other(bell: int) -> None:
    questions, answers = RingMemory(2), RingMemory(2)
    round_trips = HAMMER_MESSAGES // 8

    def answer() -> None:
        consumer, producer = questions.consumer(), answers.producer(bell)
        for _ in range(round_trips):
            assert producer.try_publish(take_woken(consumer))

    producer, consumer = questions.producer(), answers.consumer()
    with forked(answer) as child:
        for number in range(round_trips):
            assert producer.try_publish(struct.pack("<Q", number))
            assert struct.unpack_from("<Q", take_from_eventfd(consumer, bell)) == (number,)
        assert child.wait() == 0
