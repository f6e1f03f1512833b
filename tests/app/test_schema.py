"""app.schema: what /encode and /release take, and how they say no."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import InvalidItem, InvalidRequest
from app.long_texts import SplitBody
from app.schema import parse_encode, parse_release
from app.sources import InlineItem

ITEM = "data:image/png;base64,AAAA"


def parse(**fields: Any) -> Any:
    body = {"req_id": "r", "mm_items": [ITEM], "modality": "IMAGE", "num_parts": 1, "part_idx": 0}
    return parse_encode(SplitBody(json.dumps({**body, **fields}).encode()), 8)


def test_sglangs_request_is_understood_and_its_other_fields_are_ignored() -> None:
    wanted = parse(prefill_host="10.0.0.1", embedding_port=None, encoder_idx=0, time_stats_json=None)
    assert (wanted.req_id, wanted.modality, wanted.num_parts, wanted.part_idx) == ("r", "image", 1, 0)
    assert wanted.items == [InlineItem(ITEM, 22, is_base64=True)]
    assert wanted.wait == "ready"


def test_the_short_form_has_defaults() -> None:
    wanted = parse_encode(SplitBody(json.dumps({"req_id": "r", "mm_items": ITEM}).encode()), 8)
    assert (wanted.modality, wanted.num_parts, wanted.part_idx) == ("image", 1, 0)


def test_a_part_must_name_its_modality() -> None:
    body = {"req_id": "r", "mm_items": [ITEM], "num_parts": 2, "part_idx": 1}
    with pytest.raises(InvalidRequest, match="modality is missing"):
        parse_encode(SplitBody(json.dumps(body).encode()), 8)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"req_id": 5}, "req_id"),
        ({"req_id": ""}, "req_id"),
        ({"req_id": "a\r\nX-Injected: 1"}, "req_id"),
        ({"req_id": "x" * 513}, "513"),
        ({"modality": "smell"}, "modality"),
        ({"modality": 1}, "modality"),
        ({"num_parts": 0}, "num_parts"),
        ({"num_parts": "1"}, "num_parts"),
        ({"num_parts": True}, "num_parts"),
        ({"num_parts": 2, "part_idx": 2}, "part_idx"),
        ({"part_idx": -1}, "part_idx"),
        ({"hashes": {}}, "hashes"),
        ({"hashes": ["a", "b"]}, "hashes has 2 entries for 1 item"),
        ({"wait": "later"}, "wait"),
        ({"mm_items": []}, "mm_items"),
        ({"mm_items": None}, "mm_items"),
        ({"mm_items": [ITEM] * 9}, "more than 8"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        parse(**fields)


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"[]", b'{"req_id": "r", ', b'{"req_id":"\xff"}', b"\xef\xbb\xbf{}", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_encode(SplitBody(body), 8)
    assert "hello" not in caught.value.message


def test_deep_nesting_ends_in_an_error_and_not_in_the_interpreters_limit() -> None:
    body = b'{"req_id":"r","mm_items":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(InvalidRequest, match="nested"):
        parse_encode(SplitBody(body), 8)


def test_an_empty_item_is_an_item_error_with_its_index() -> None:
    with pytest.raises(InvalidItem) as caught:
        parse(mm_items=[ITEM, ""])
    assert caught.value.item_index == 1


def test_release_takes_a_nonce_or_a_handle() -> None:
    handle = {
        "boot_id": "b", "segment": 0, "epoch": 1, "block": 2, "generation": 3, "offset": 4, "nbytes": 5,
        "rows": 6, "dim": 7, "dtype": "float32", "nonce": "n2",
    }  # fmt: skip
    assert parse_release(b'{"nonce":"n1"}').wanted_nonce() == "n1"
    assert parse_release(json.dumps({"handle": handle}).encode()).wanted_nonce() == "n2"
    with pytest.raises(InvalidRequest, match="nonce"):
        parse_release(b"{}").wanted_nonce()
