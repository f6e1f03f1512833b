"""shm._core.find_long_strings: where the long strings of a JSON text are."""

import json
import random

import pytest

from shm._core import find_long_strings


def found(text: bytes, min_bytes: int) -> list[bytes]:
    return [text[start:end] for start, end in find_long_strings(text, min_bytes)]


def test_strings_of_at_least_the_length_are_found_in_order() -> None:
    text = json.dumps({"a": "x" * 10, "bb": ["y" * 9, "z" * 11], "key of twelve": 1}).encode()
    assert found(text, 10) == [b"x" * 10, b"z" * 11, b"key of twelve"]


@pytest.mark.parametrize("content", ["\\", '\\"', "a\\\\", "\u00e9", "\n", "\x7f\u20ac"])
def test_strings_with_escapes_or_beyond_ascii_are_left_alone(content: str) -> None:
    for ascii_only in (True, False):
        text = json.dumps(["p" * 20 + content + "q" * 20, "r" * 20], ensure_ascii=ascii_only).encode()
        assert found(text, 20)[-1] == b"r" * 20
        assert len(found(text, 20)) == 1


def test_a_raw_control_character_is_left_for_the_decoder_to_refuse() -> None:
    for position in range(20):
        content = bytearray(b"s" * 20)
        content[position] = 0x1F
        assert found(b'["' + content + b'"]', 10) == []


@pytest.mark.parametrize("text", [b"", b'"', b'"abc', b'"abc\\', b'"abc\\"', b"no strings", b'["a"'])
def test_text_that_ends_early_has_no_long_string(text: bytes) -> None:
    assert found(text, 2) == []


def test_strings_without_end_and_with_many_escapes_take_linear_time() -> None:
    assert found(b'"' + b"\\" * 4_000_001, 10) == []
    assert found(b'"' + b'\\"' * 2_000_001, 10) == []


def test_what_is_found_agrees_with_a_json_decoder() -> None:
    generator = random.Random(7)
    for _ in range(300):
        strings = [
            "".join(
                generator.choices(
                    'ab"\\\n\u00e9 /', weights=(40, 40, 1, 1, 1, 1, 5, 5), k=generator.randrange(40)
                )
            )
            for _ in range(8)
        ]
        text = json.dumps({"k": strings}, ensure_ascii=generator.random() < 0.5).encode()
        plain = [s.encode() for s in strings if len(s) >= 12 and s.isascii() and not set(s) & set('"\\\n')]
        assert found(text, 12) == plain


def test_a_length_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="min_bytes"):
        find_long_strings(b"", 0)
