"""app.long_texts: a body without its long strings, and the items that come of it."""

import base64
import json
import random

import pytest

from app.errors import InvalidItem, InvalidRequest
from app.long_texts import LONG_BYTES, SCAN_INLINE_BYTES, SplitBody, split_body
from app.schema import EncodeRequest, parse_encode, req_id_of
from app.sources import InlineItem
from tests.app.serving import run


def body_of(*items: object, **fields: object) -> bytearray:
    return bytearray(json.dumps({"req_id": "r", "mm_items": list(items), **fields}).encode())


def split(body: bytearray) -> SplitBody:
    return run(split_body(body))


def parsed(body: bytearray) -> EncodeRequest:
    return parse_encode(split(body), 8)


def media(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


@pytest.mark.parametrize("nbytes", [LONG_BYTES, SCAN_INLINE_BYTES])
def test_long_items_are_views_of_the_body_and_short_ones_strings(nbytes: int) -> None:
    long, short = base64.b64encode(media(nbytes)).decode(), base64.b64encode(media(60)).decode()
    body = body_of(long, "data:image/png;base64," + long, {"url": long}, short)
    texts = []
    for item in parsed(body).items:
        assert isinstance(item, InlineItem)
        texts.append(item.text[item.start :])
    assert [type(text) for text in texts] == [memoryview, memoryview, memoryview, str]
    assert [bytes(text) for text in texts[:3] if isinstance(text, memoryview)] == [long.encode()] * 3
    assert texts[3] == short


def test_a_small_body_is_not_looked_at() -> None:
    body = body_of("aaaa")
    assert split(body).json is body


def test_a_long_string_anywhere_else_is_refused_as_it_always_was() -> None:
    long = "a" * LONG_BYTES
    refused = split(body_of("aaaa", req_id=long))
    with pytest.raises(InvalidRequest, match="req_id must have 1 to 512"):
        parse_encode(refused, 8)
    assert req_id_of(refused) == ""
    with pytest.raises(InvalidRequest, match="modality must be one of"):
        parsed(body_of("aaaa", modality=long))
    assert parsed(body_of("aaaa", hashes=[long], unknown=long)).req_id == "r"


@pytest.mark.parametrize("prefix", ["http://host/", "https://host/", "file:///", "data:image/png;base64"])
def test_what_is_too_long_for_a_url_or_path_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidItem):
        parsed(body_of(prefix + "a" * LONG_BYTES))


def test_a_client_cannot_name_a_long_string_by_its_number() -> None:
    items = parsed(body_of("a" * LONG_BYTES, "0", ":0")).items
    assert [item.text for item in items[1:] if isinstance(item, InlineItem)] == ["0", ":0"]
