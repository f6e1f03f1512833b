"""shm.received_descriptors: every descriptor that came is somebody's, or closed."""

import os

import pytest

from shm.errors import SessionClosed
from shm.received_descriptors import ReceivedDescriptors


def test_what_nobody_took_is_closed_and_what_was_taken_is_not() -> None:
    reading, writing = os.pipe()
    with ReceivedDescriptors([reading, writing]) as received:
        taken = received.take()
    assert taken == reading
    assert os.read(taken, 1) == b"", "the writing end is closed"
    os.close(taken)


def test_too_few_descriptors_end_the_session() -> None:
    with ReceivedDescriptors([]) as received, pytest.raises(SessionClosed):
        received.take()
