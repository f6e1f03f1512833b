"""Frame tables: which packets a choice needs, and what is believed of a file."""

from fractions import Fraction
from typing import Any

import pytest

from gpu_workers.media.frame_table import FrameTable, Packed, read_table
from tests.gpu_workers.video_files import HEIGHT, WIDTH, encode

GROUPS = {"x264-params": "keyint=12:min-keyint=12:scenecut=0:bframes=0"}


def table_of(pts: list[int], keyframes: set[int]) -> FrameTable:
    """Packets in this order; a table with nothing hidden."""
    return FrameTable(
        pts=tuple(sorted(pts)),
        times_s=tuple(value / 10 for value in sorted(pts)),
        packets=tuple(Packed(value, value in keyframes, False, False) for value in pts),
        fps=Fraction(10),
        width=WIDTH,
        height=HEIGHT,
        quarter_turns=0,
    )


def read(data: memoryview) -> FrameTable:
    return read_table(data, max_pixels=1_000_000, max_seconds=600)


def test_a_frame_needs_its_group_up_to_itself() -> None:
    table = table_of(list(range(60)), {0, 20, 40})
    assert [place for place, is_needed in enumerate(table.packets_for([42])) if is_needed] == [40, 41, 42]


def test_a_picture_shown_before_its_keyframe_needs_the_group_before() -> None:
    order = [*range(20), 22, 20, 21, *range(23, 40)]  # 22 is the keyframe; 20 and 21 refer back
    table = table_of(order, {0, 22})
    assert sum(table.packets_for([21])) == 23
    assert sum(table.packets_for([22])) == 1


def test_a_small_gap_is_decoded_through() -> None:
    table = table_of(list(range(60)), {0, 5, 30})
    assert table.packets_for([0, 5])[:7] == [True] * 6 + [False]
    assert sum(table.packets_for([0, 30])) == 2


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [
        ({"options": GROUPS}, False),
        ({"options": GROUPS, "container": "matroska"}, False),
        ({"options": GROUPS, "container": "mpegts"}, False),
        ({"options": GROUPS, "container": "avi"}, True),  # no presentation times
        ({"codec": "libvpx", "container": "webm"}, True),  # hidden frames
        ({"codec": "mpeg4"}, True),  # packed frames
    ],
)
def test_frames_are_counted_only_where_packets_do_not_tell(arguments: dict[str, Any], counted: bool) -> None:
    table = read(encode(range(30), **arguments))
    assert table.counted == counted
    assert len(table.times_s) == 30
    assert not table.damaged


def test_the_rate_is_the_containers() -> None:
    assert read(encode(range(30), fps=25)).fps == 25
    assert read(encode([0], container="mpegts")).fps == 24  # one frame has no rate


@pytest.mark.parametrize(("degrees", "turns"), [(0, 0), (90, 1), (180, 2), (270, 3), (-90, 3)])
def test_a_display_rotation_is_quarter_turns(degrees: int, turns: int) -> None:
    table = read(encode(range(3), rotation=degrees))
    assert (table.width, table.height, table.quarter_turns) == (WIDTH, HEIGHT, turns)
