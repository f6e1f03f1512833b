"""app.items: what a string or an object in mm_items means."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidItem, InvalidRequest, RequestError
from app.items import CompositeItem, Item, NamedArray, parse_items
from app.sources import InlineItem, RemoteItem

PNG = "data:image/png;base64,AAAA"


def parse(value: Any) -> list[Item]:
    return parse_items(value, 16)


@pytest.mark.parametrize(
    "value",
    [
        {"url": PNG},
        {"url": PNG, "type": "image", "content_hash": "sha256:00"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": PNG},
        [[{"image_url": {"url": PNG}}]],
    ],
)
def test_openai_and_sglang_objects_are_understood(value: Any) -> None:
    assert parse(value) == [InlineItem(PNG, 22, is_base64=True)]


def test_what_stands_beside_a_url_is_an_option_of_the_item() -> None:
    inline = InlineItem(PNG, 22, is_base64=True)
    for value in (
        {"url": PNG, "detail": "high", "max_pixels": 7, "content_hash": "sha256:00"},
        {"type": "image_url", "max_pixels": 7, "image_url": {"url": PNG, "detail": "high"}},
    ):
        assert parse(value) == [CompositeItem("media", (inline,), {"max_pixels": 7, "detail": "high"})]


def test_a_list_of_frames_is_one_item() -> None:
    [found] = parse({"frames": [PNG, "http://h/2.png"], "fps": 4})
    sources = (InlineItem(PNG, 22, is_base64=True), RemoteItem("http://h/2.png"))
    assert found == CompositeItem("frames", sources, {"fps": 4})
    assert parse([{"images": [PNG]}, PNG])[0] == CompositeItem("frames", sources[:1])


def test_kimi_names_its_media() -> None:
    one, two = InlineItem(PNG, 22, is_base64=True), RemoteItem("http://h/2.png")
    found = parse(
        [
            {"type": "image", "image": PNG},
            {"type": "image", "image": {"url": "http://h/2.png"}},
            {"type": "image", "image": [PNG, ["http://h/2.png"]]},
            {"type": "video_chunk", "video_chunk": [PNG, {"url": "http://h/2.png"}], "fps": 2},
            {"type": "video_chunk", "frames": [PNG]},
        ]
    )
    assert found == [
        one,
        two,
        CompositeItem("frames", (one, two)),
        CompositeItem("chunk", (one, two), {"fps": 2}),
        CompositeItem("chunk", (one,)),
    ]


def test_a_chunk_in_a_request_for_videos_is_a_list_of_frames() -> None:
    [found] = parse_items({"video_chunk": [PNG]}, 1, lists_are_videos=True)
    assert found == CompositeItem("frames", (InlineItem(PNG, 22, is_base64=True),))


def test_a_list_in_a_request_for_videos_is_one_videos_frames() -> None:
    pictures, clips = [PNG, "http://h/2.png"], ["http://h/a.mp4", "http://h/b.mp4"]
    found = parse_items([pictures, "http://h/c.mp4", clips], 16, lists_are_videos=True)
    assert found == [
        CompositeItem("frames", (InlineItem(PNG, 22, is_base64=True), RemoteItem("http://h/2.png"))),
        RemoteItem("http://h/c.mp4"),
        RemoteItem("http://h/a.mp4"),
        RemoteItem("http://h/b.mp4"),
    ]
    assert len(parse_items(pictures, 16, lists_are_videos=True)) == 2


def test_arrays_may_stand_without_their_key_as_sglang_sends_what_is_processed() -> None:
    array = {"dtype": "BOOL", "shape": [1, 4], "data": "AQEAAA=="}
    bare, named = parse({"input_features_mask": array}), parse({"processed": {"input_features_mask": array}})
    assert bare == named
    assert bare[0].arrays[0].dtype == "BOOL"


def test_processed_items_are_a_file_or_arrays() -> None:
    inline = InlineItem("AAAAAA==", 0, is_base64=True)
    assert parse({"processed": "AAAAAA=="}) == [CompositeItem("processed", (inline,))]
    array = {"dtype": "F32", "shape": [1, 1], "data": "AAAAAA=="}
    [found] = parse({"processed": {"pixel_values": array}})
    assert found == CompositeItem(
        "processed", (), arrays=(NamedArray("pixel_values", "F32", (1, 1), inline),)
    )


def test_nested_lists_keep_their_order() -> None:
    found = parse([["http://a", "http://b"], ["http://c"]])
    assert found == [RemoteItem("http://a"), RemoteItem("http://b"), RemoteItem("http://c")]


@pytest.mark.parametrize(
    ("value", "error", "named"),
    [
        ([[]], InvalidRequest, r"mm_items\[0\] is empty"),
        ([42], InvalidRequest, r"mm_items\[0\].*int"),
        ([PNG, True], InvalidRequest, r"mm_items\[1\].*bool"),
        ([None], InvalidRequest, "null"),
        (7, InvalidRequest, "mm_items"),
        ([{"foo": "bar"}], InvalidRequest, r"mm_items\[0\]"),
        ([{"url": 5}], InvalidRequest, "int"),
        ([{"image_url": {"detail": "low"}}], InvalidRequest, r"mm_items\[0\]\.image_url"),
        ([[[[[PNG]]]]], InvalidRequest, "nested"),
        ([{"frames": []}], InvalidRequest, r"mm_items\[0\]\.frames"),
        ([{"frames": [PNG, 5]}], InvalidRequest, r"frames\[1\].*int"),
        (
            [{"type": "video_chunk", "url": PNG}],
            InvalidItem,
            r"mm_items\[0\] is a video_chunk without a list",
        ),
        ([{"type": "video_chunk", "video_chunk": PNG}], InvalidRequest, r"video_chunk must be a list"),
        ([{"type": "image", "image": []}], InvalidRequest, r"mm_items\[0\]\.image must be a list"),
        ([{"type": "image", "image": [PNG, [7]]}], InvalidRequest, r"image\[1\].*int"),
        ([{"frames": [PNG] * 1025}], InvalidRequest, "1024"),
        ([{"url": PNG, "note": "a" * 5000}], InvalidItem, "options"),
        ([{"processed": {}}], InvalidRequest, "arrays"),
        ([{"processed": {"a": {"dtype": "U8"}}}], InvalidItem, "processed.a"),
        ([{"processed": {"a": {"dtype": "F32", "shape": [0], "data": "AAAA"}}}], InvalidItem, "processed.a"),
        ([{"processed": {"a": {"dtype": "F32", "shape": [1], "data": "http://h"}}}], InvalidItem, "base64"),
    ],
)
def test_what_is_no_item_is_refused_by_name(value: Any, error: type[RequestError], named: str) -> None:
    with pytest.raises(error, match=named):
        parse(value)
