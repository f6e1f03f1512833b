"""The Python mirror of the layout: equal to C's constants, packed and parsed back, judged where it must."""

import pytest

from shm import _core, layout
from shm._core import word_store
from shm.errors import RegionCorrupt
from shm.layout import (
    BlockHeader,
    BlockState,
    Completion,
    CompletionKind,
    Dtype,
    RegionHeader,
    RegionKind,
    SessionDescriptor,
    Submission,
    SubmissionKind,
)

HEADER = RegionHeader(RegionKind.SEGMENT, 3, 7, 1 << 20, 64, 8192, bytes(range(16)))


def test_python_and_c_agree_on_every_size() -> None:
    assert layout.LINE_BYTES == _core.CACHE_LINE_BYTES == _core.PRODUCER_SIDE_OVERHEAD_BYTES
    assert layout.SLOT_BYTES == _core.SLOT_BYTES
    assert layout.CONSUMER_SIDE_BYTES == _core.CONSUMER_SIDE_BYTES
    assert layout.BLOCK_HEADER_BYTES == _core.BLOCK_HEADER_BYTES
    assert BlockState.FREE.value == _core.BLOCK_STATE_FREE
    assert layout.producer_side_bytes(8) == _core.PRODUCER_SIDE_OVERHEAD_BYTES + 8 * _core.SLOT_BYTES


def test_a_link_holds_its_two_rings_side_by_side_on_cache_lines() -> None:
    slot_count = 64
    submission_producer, submission_consumer = layout.link_submission_offsets()
    completion_producer, completion_consumer = layout.link_completion_offsets(slot_count)
    starts = [submission_consumer, submission_producer, completion_consumer, completion_producer]
    assert starts == sorted(starts)
    assert submission_producer - submission_consumer == layout.CONSUMER_SIDE_BYTES
    assert completion_consumer - submission_producer == layout.producer_side_bytes(slot_count)
    assert completion_producer - completion_consumer == layout.CONSUMER_SIDE_BYTES
    assert completion_producer + layout.producer_side_bytes(slot_count) <= layout.link_bytes(slot_count)
    assert all(start % layout.LINE_BYTES == 0 for start in starts)
    assert layout.LINK_INFO_OFFSET + layout.LINK_INFO_CAPACITY_BYTES <= layout.LINK_SUBMISSION_OFFSET


def test_a_region_header_is_refused_until_its_version_was_stored() -> None:
    raw = bytearray(HEADER.pack())
    with pytest.raises(RegionCorrupt):
        RegionHeader.unpack(bytes(raw))
    word_store(raw, layout.VERSION_OFFSET, layout.LAYOUT_VERSION)
    assert RegionHeader.unpack(bytes(raw)) == HEADER


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (8, 2), (40, 99)])
def test_a_region_of_another_magic_version_or_kind_is_refused(offset: int, value: int) -> None:
    raw = bytearray(HEADER.pack())
    word_store(raw, layout.VERSION_OFFSET, layout.LAYOUT_VERSION)
    word_store(raw, offset, value)
    with pytest.raises(RegionCorrupt):
        RegionHeader.unpack(bytes(raw))


def test_every_descriptor_fills_a_slot_and_comes_back_the_same() -> None:
    submission = Submission(SubmissionKind.ENCODE, 1, 2, 3, 4, 5, 6, 7, 8)
    completion = Completion(CompletionKind.READY, *range(1, 19))
    session = SessionDescriptor(1, 2**63)
    assert Submission.unpack(submission.pack()) == submission
    assert Completion.unpack(completion.pack()) == completion
    assert SessionDescriptor.unpack(session.pack()) == session
    for descriptor in (submission, completion, session):
        assert len(descriptor.pack()) == layout.SLOT_BYTES


def test_an_unknown_descriptor_kind_is_region_corrupt() -> None:
    for parse in (Submission.unpack, Completion.unpack):
        with pytest.raises(RegionCorrupt):
            parse(b"\xff" + bytes(127))


def test_a_block_header_fills_its_64_bytes_and_comes_back_the_same() -> None:
    header = BlockHeader(*range(1, 13))
    assert len(header.pack()) == layout.BLOCK_HEADER_BYTES
    assert BlockHeader.unpack(header.pack()) == header
    assert layout.block_header_offset(2) == layout.BLOCK_TABLE_OFFSET + 2 * layout.BLOCK_HEADER_BYTES


def test_pages_are_aligned_upwards() -> None:
    assert [layout.page_align(nbytes) for nbytes in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_element_types_know_their_width_and_their_name() -> None:
    assert [(dtype.label, dtype.itemsize) for dtype in Dtype] == [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
    ]


def test_a_sessions_regions_hold_their_parts_side_by_side() -> None:
    line, slots = layout.LINE_BYTES, layout.SESSION_REQUEST_SLOTS
    submissions_end = layout.SESSION_SIDE_OFFSET + layout.producer_side_bytes(layout.SESSION_SLOT_COUNT)
    assert submissions_end <= layout.SESSION_COMPLETION_CONSUMER_OFFSET
    consumer_end = layout.SESSION_COMPLETION_CONSUMER_OFFSET + layout.CONSUMER_SIDE_BYTES
    assert consumer_end <= layout.SESSION_INPUT_OFFSET == layout.session_client_bytes(0)
    assert layout.session_client_bytes(1) == layout.SESSION_INPUT_OFFSET + layout.PAGE_BYTES
    taken_end = layout.SESSION_SIDE_OFFSET + layout.CONSUMER_SIDE_BYTES
    assert taken_end <= layout.SESSION_COMPLETION_PRODUCER_OFFSET
    producer_end = layout.SESSION_COMPLETION_PRODUCER_OFFSET + layout.producer_side_bytes(slots)
    assert producer_end <= layout.SESSION_FAULT_OFFSET
    assert layout.session_fault_offset(slots - 1) + layout.SESSION_FAULT_BYTES <= layout.SESSION_CONTROL_BYTES
    assert layout.session_fault_offset(slots + 3) == layout.session_fault_offset(3)
    for offset in (
        layout.SESSION_SIDE_OFFSET,
        layout.SESSION_COMPLETION_CONSUMER_OFFSET,
        layout.SESSION_COMPLETION_PRODUCER_OFFSET,
    ):
        assert offset % line == 0


def test_session_slots_survive_the_trip() -> None:
    asked = layout.SessionDescriptor(layout.SessionKind.ENCODE, 1, 2, 3, 4, 5, 6, 7, 1)
    assert layout.SessionDescriptor.unpack(asked.pack()) == asked
    answer = layout.SessionCompletion(layout.SessionAnswer.READY, *range(2, 17))
    assert layout.SessionCompletion.unpack(answer.pack()) == answer
    with pytest.raises(RegionCorrupt):
        layout.SessionCompletion.unpack(b"\xff" * layout.SLOT_BYTES)
