"""shm.encode_ring: many threads, one ring; control is played by hand, through real regions."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from shm.encode_call import EncodeRefused
from shm.encode_request import Request, pack_request
from shm.encode_ring import EncodeRing
from shm.errors import LeaseRefused, SessionClosed, WaitTimeout
from shm.layout import (
    SESSION_REQUEST_SLOTS,
    RegionKind,
    SessionAnswer,
    SessionCompletion,
    SessionDescriptor,
    SessionKind,
    SessionWait,
)
from shm.messages import SessionFault
from shm.region import attach_region
from shm.session import SessionRegions, create_session_regions, read_run
from shm.submission_ring import SubmissionRing

INPUT_BYTES = 1 << 20
PATIENCE_S = 60.0


@dataclass
class Control:
    """The daemon's end: takes descriptors one at a time, sleeping on the bell, and answers as it is told."""

    regions: SessionRegions
    alive: bool = True
    ended: list[int] = field(default_factory=list)

    def take(self) -> SessionDescriptor:
        while (slot := self.regions.submissions.try_take()) is None:
            if self.regions.submissions.arm():
                os.set_blocking(self.regions.bell, True)
                os.eventfd_read(self.regions.bell)
        return SessionDescriptor.unpack(slot)

    def ready(self, request: int, lease: int = 1) -> None:
        self.publish(SessionCompletion(SessionAnswer.READY, request, lease))

    def fail(self, request: int, status: int, fault: SessionFault) -> None:
        nbytes = self.regions.store_fault(request, fault)
        self.publish(SessionCompletion(SessionAnswer.FAILED, request, status=status, fault_bytes=nbytes))

    def publish(self, completion: SessionCompletion) -> None:
        assert self.regions.completions.try_publish(completion.pack())

    def check(self) -> None:
        if not self.alive:
            raise SessionClosed("the daemon is gone")


@pytest.fixture
def control() -> Iterator[Control]:
    with create_session_regions(bytes(16), 1, INPUT_BYTES) as regions:
        yield Control(regions)


@pytest.fixture
def ring(control: Control) -> Iterator[EncodeRing]:
    regions = control.regions
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = attach_region(os.dup(regions.client.fd), RegionKind.SESSION_CLIENT, writable=True)
    read_only = attach_region(
        os.dup(regions.control_read_only_fd), RegionKind.SESSION_CONTROL, writable=False
    )
    releases = SubmissionRing(client, read_only, os.dup(regions.bell), ours)
    ring = EncodeRing(releases, client, read_only, INPUT_BYTES, control.check, control.ended.append)
    with theirs:
        yield ring
        ring.close()
        releases.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def request(*items: bytes) -> Request:
    return pack_request(items or (b"item",), "image", "")


def encode(
    ring: EncodeRing, what: Request, timeout: float = PATIENCE_S, wait: SessionWait = SessionWait.READY
) -> SessionCompletion:
    return ring.finish(ring.begin(what, wait, timeout))


def test_the_bytes_and_the_terms_arrive_and_the_answer_comes_back(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    packed = pack_request([b"one", b"two"], "image", "name")
    answer = threads.submit(encode, ring, packed, wait=SessionWait.SHAPE)
    asked = control.take()
    assert (asked.kind, asked.wait) == (SessionKind.ENCODE, SessionWait.SHAPE)
    assert (asked.nbytes, asked.metadata_bytes, asked.req_id_bytes) == packed[1:]
    run = bytearray(asked.nbytes)
    read_run(control.regions.input_fd, asked.offset, memoryview(run))
    assert run == b"".join(packed.pieces)
    told = SessionCompletion(SessionAnswer.SHAPE, asked.request, 7, 2, 4096, 64, 1, 3, 5, 4, 8, 1)
    control.publish(told)
    assert answer.result() == told
    assert ring.under_way() == 0


def test_answers_in_any_order_reach_their_threads(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    """Whoever leads: the first answer goes to the last who asked, and so on."""
    waiting: list[tuple[SessionDescriptor, Future[SessionCompletion]]] = []
    for _ in range(16):
        answer = threads.submit(encode, ring, request())
        waiting.append((control.take(), answer))
    for asked, answer in reversed(waiting):
        control.ready(asked.request, lease=asked.request)
        assert answer.result().lease == asked.request
    assert ring.under_way() == 0


def test_many_threads_share_the_ring_and_every_answer_is_the_right_one(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    rounds, clients = 100, 16

    def ask(client: int) -> bool:
        name = f"client {client}"
        packed = pack_request([name.encode()], "image", name)
        return all(encode(ring, packed).lease == client for _ in range(rounds))

    right = [threads.submit(ask, client) for client in range(clients)]
    for _ in range(rounds * clients):
        asked = control.take()
        run = bytearray(asked.nbytes)
        read_run(control.regions.input_fd, asked.offset, memoryview(run))
        req_id = run[asked.metadata_bytes :][: asked.req_id_bytes].decode()
        control.ready(asked.request, lease=int(req_id.split()[1]))
    assert all(answer.result() for answer in right)


def test_one_thread_has_many_under_way_and_takes_them_in_any_order(
    control: Control, ring: EncodeRing
) -> None:
    calls = [ring.begin(request(), SessionWait.READY, PATIENCE_S) for _ in range(SESSION_REQUEST_SLOTS)]
    for asked in [control.take() for _ in calls]:
        control.ready(asked.request, lease=asked.request)
    assert all(ring.finish(call).lease == call.number for call in reversed(calls))
    assert ring.under_way() == 0


def test_who_has_no_slot_takes_the_answers_that_wait(control: Control, ring: EncodeRing) -> None:
    calls = [ring.begin(request(), SessionWait.READY, PATIENCE_S) for _ in range(SESSION_REQUEST_SLOTS)]
    control.ready(control.take().request, lease=5)
    one_more = ring.begin(request(), SessionWait.READY, PATIENCE_S)  # waits for the slot of that answer
    assert ring.finish(calls[0]).lease == 5
    assert one_more.answer is None
    with pytest.raises(WaitTimeout, match="in use"):
        ring.begin(request(), SessionWait.READY, 0.05)


def test_what_is_abandoned_or_forgotten_is_cancelled_and_its_lease_ends(
    control: Control, ring: EncodeRing
) -> None:
    answered, cancelled, forgotten, last = (
        ring.begin(request(), SessionWait.READY, PATIENCE_S) for _ in range(4)
    )
    for call in (answered, cancelled, forgotten, last):
        assert control.take().request == call.number
    control.ready(answered.number, lease=1)
    control.ready(last.number, lease=4)
    assert ring.finish(last).lease == 4
    ring.abandon(answered)
    assert control.ended == [1]
    ring.abandon(cancelled)
    ring.forget(forgotten)
    ring.begin(request(), SessionWait.READY, PATIENCE_S)
    sent = [control.take() for _ in range(3)]
    assert [(one.kind, one.request) for one in sent[:2]] == [
        (SessionKind.CANCEL, cancelled.number),
        (SessionKind.CANCEL, forgotten.number),
    ]
    assert sent[2].kind == SessionKind.ENCODE


def test_a_failure_comes_with_the_words_of_http(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(encode, ring, request())
    control.fail(control.take().request, 422, SessionFault("item_undecodable", "mm_items[0] is truncated"))
    with pytest.raises(EncodeRefused) as refused:
        answer.result()
    assert (refused.value.status, refused.value.code) == (422, "item_undecodable")
    assert refused.value.message == "mm_items[0] is truncated"
    answer = threads.submit(encode, ring, request())
    control.fail(control.take().request, 429, SessionFault("session_full", "cap"))
    with pytest.raises(LeaseRefused):
        answer.result()


def test_a_fault_that_is_too_long_is_cut(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(encode, ring, request())
    control.fail(control.take().request, 400, SessionFault("invalid_request", "é" * 1000))
    with pytest.raises(EncodeRefused, match="éééé"):
        answer.result()


def test_a_timeout_cancels_and_a_late_answer_leaves_no_lease_and_no_slot_taken(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    with pytest.raises(WaitTimeout):
        encode(ring, request(), timeout=0.05)
    asked, cancelled = control.take(), control.take()
    assert (cancelled.kind, cancelled.request) == (SessionKind.CANCEL, asked.request)
    assert ring.under_way() == 1
    control.ready(asked.request, lease=9)
    answer = threads.submit(encode, ring, request())
    control.ready(control.take().request, lease=10)
    assert answer.result().lease == 10
    assert control.ended == [9]
    assert ring.under_way() == 0


def test_the_leaders_timeout_does_not_leave_the_others_alone(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    leader = threads.submit(encode, ring, request(), 0.2)
    control.take()
    followers = []
    for _ in range(4):
        answer = threads.submit(encode, ring, request())
        followers.append((control.take(), answer))
    with pytest.raises(WaitTimeout):
        leader.result()
    assert control.take().kind == SessionKind.CANCEL
    for asked, answer in followers:
        control.ready(asked.request, lease=3)
        assert answer.result().lease == 3


def test_a_full_input_region_makes_the_next_one_wait_its_turn(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    large = request(bytes(INPUT_BYTES * 3 // 4))
    first = threads.submit(encode, ring, large)
    asked = control.take()
    with pytest.raises(WaitTimeout, match="in use"):
        encode(ring, large, timeout=0.05)
    second = threads.submit(encode, ring, large)
    control.ready(asked.request)
    assert first.result().kind is SessionAnswer.READY
    control.ready(control.take().request)
    assert second.result().kind is SessionAnswer.READY


def test_request_slots_are_used_again_and_never_twice_at_once(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    for _ in range(SESSION_REQUEST_SLOTS + 10):
        with pytest.raises(WaitTimeout):
            encode(ring, request(), timeout=0)
    # Each of the first was sent and cancelled; then all slots were taken.
    asked = [control.take() for _ in range(2 * SESSION_REQUEST_SLOTS)]
    numbers = [descriptor.request for descriptor in asked if descriptor.kind == SessionKind.ENCODE]
    assert len({number % SESSION_REQUEST_SLOTS for number in numbers}) == SESSION_REQUEST_SLOTS
    for number in numbers:
        control.fail(number, 499, SessionFault("cancelled", "the request was cancelled"))
    answer = threads.submit(encode, ring, request())
    control.ready(control.take().request)
    assert answer.result().kind is SessionAnswer.READY
    assert ring.under_way() == 0


def test_what_never_fits_is_refused_without_being_sent(ring: EncodeRing) -> None:
    with pytest.raises(EncodeRefused) as refused:
        encode(ring, request(bytes(INPUT_BYTES)))
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_closing_ends_every_wait(control: Control, ring: EncodeRing, threads: ThreadPoolExecutor) -> None:
    answers = []
    for _ in range(4):
        answers.append(threads.submit(encode, ring, request()))
        control.take()
    ring.close()
    for answer in answers:
        with pytest.raises(SessionClosed):
            answer.result()
    with pytest.raises(SessionClosed):
        encode(ring, request())


def test_the_daemons_death_ends_every_wait(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor
) -> None:
    answers = []
    for _ in range(4):
        answers.append(threads.submit(encode, ring, request()))
        control.take()
    control.alive = False
    for answer in answers:
        with pytest.raises(SessionClosed, match="gone"):
            answer.result()


CORRUPTIONS: list[Callable[[Control, int], None]] = [
    lambda control, request: control.ready(request + 1),
    lambda control, request: control.ready(request + SESSION_REQUEST_SLOTS),
    lambda control, request: control.publish(
        SessionCompletion(SessionAnswer.FAILED, request, fault_bytes=1 << 30)
    ),
    lambda control, request: control.publish(SessionCompletion(SessionAnswer.FAILED, request, fault_bytes=9)),
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_an_impossible_answer_ends_the_session(
    control: Control, ring: EncodeRing, threads: ThreadPoolExecutor, corrupt: Callable[[Control, int], None]
) -> None:
    answer = threads.submit(encode, ring, request())
    corrupt(control, control.take().request)
    with pytest.raises(Exception, match=r"answer|fault"):
        answer.result()
    with pytest.raises(SessionClosed):
        encode(ring, request())
