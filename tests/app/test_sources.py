"""app.sources: what a string in mm_items names."""

from __future__ import annotations

import base64

import pytest

from app.errors import InvalidItem, ItemRefused, RequestError
from app.sources import InlineItem, LocalItem, RemoteItem, Source, parse_text


def parse(text: str) -> Source:
    return parse_text(text, text, "mm_items[3]", 3)


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("data:image/png;base64,AAAA", InlineItem("data:image/png;base64,AAAA", 22, True)),
        ("data:;base64,AAAA", InlineItem("data:;base64,AAAA", 13, True)),
        ("DATA:IMAGE/PNG;BASE64,AAAA", InlineItem("DATA:IMAGE/PNG;BASE64,AAAA", 22, True)),
        ("data:image/png;a=b;base64,AA", InlineItem("data:image/png;a=b;base64,AA", 26, True)),
        ("data:image/png,%89PNG", InlineItem("data:image/png,%89PNG", 15, False)),
        ("data:,hello", InlineItem("data:,hello", 6, False)),
        ("iVBORw0KGgo=", InlineItem("iVBORw0KGgo=", 0, True)),
        ("HTTP://Host/x.png", RemoteItem("HTTP://Host/x.png")),
        ("https://host/x.png", RemoteItem("https://host/x.png")),
        ("/media/x.png", LocalItem("/media/x.png")),
        ("file:///media/a%20b.png", LocalItem("/media/a b.png")),
        ("file://localhost/media/x", LocalItem("/media/x")),
        ("file:/media/x", LocalItem("/media/x")),
    ],
)  # fmt: skip
def test_a_string_is_classified_by_its_beginning(text: str, item: Source) -> None:
    assert parse(text) == item


@pytest.mark.parametrize("size", [3, 300, 3000])
def test_the_base64_of_a_jpeg_is_not_taken_for_a_path(size: int) -> None:
    text = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(size)).decode()
    assert text.startswith("/9j/")
    assert parse(text) == InlineItem(text, 0, is_base64=True)


def test_long_base64_of_anything_that_begins_with_a_slash_is_not_a_path() -> None:
    text = base64.b64encode(b"\xff" * 300).decode()
    assert parse(text) == InlineItem(text, 0, is_base64=True)


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("", InvalidItem, "empty"),
        ("data:image/png;base64AAAA", InvalidItem, "comma"),
        ("data:image/png;base64,", InvalidItem, "empty"),
        ("http://h/" + "a" * 8192, InvalidItem, "8192"),
        ("ftp://h/x", ItemRefused, "scheme"),
        ("file://other/x", ItemRefused, "host"),
        ("file:x", InvalidItem, "absolute"),
    ],
)
def test_a_string_that_names_nothing_is_refused_by_its_items_name(
    text: str, error: type[RequestError], named: str
) -> None:
    with pytest.raises(error, match=rf"mm_items\[3\].*{named}") as refused:
        parse(text)
    assert refused.value.item_index == 3
