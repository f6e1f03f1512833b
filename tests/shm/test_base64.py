"""Base64 decoding: equal to the standard library's on what is right, refused by position on what is not."""

import base64
import mmap
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm._core import base64_decode_into, base64_decoded_bytes

GUARD = 0xA5


def decode(source: bytes | str) -> bytes:
    """Decode into a target with room to spare; nothing outside the result may change."""
    target = bytearray([GUARD]) * (len(source) + 16)
    written = base64_decode_into(source, target, 8)
    assert written <= base64_decoded_bytes(source)
    assert set(target[:8] + target[8 + written :]) <= {GUARD}
    return bytes(target[8 : 8 + written])


def refusal(source: bytes | str, room: int = 64) -> str:
    with pytest.raises(ValueError, match="base64") as caught:
        base64_decode_into(source, bytearray(room), 0)
    return str(caught.value)


@pytest.mark.parametrize("nbytes", [*range(40), 1000, 65537])
def test_every_length_decodes_with_and_without_padding(nbytes: int) -> None:
    data = bytes((7 * n + nbytes) & 0xFF for n in range(nbytes))
    encoded = base64.b64encode(data)
    assert decode(encoded) == data
    assert decode(encoded.decode()) == data
    assert decode(encoded.rstrip(b"=")) == data


def test_every_group_of_six_bits_decodes() -> None:
    data = bytes(range(256)) * 3
    assert decode(base64.b64encode(data)) == data


@pytest.mark.parametrize("place", range(32))
def test_every_character_is_decoded_skipped_or_refused_wherever_it_is(place: int) -> None:
    for character in range(256):
        text = bytearray(b"Zk" * 16)
        text[place] = character
        if (chr(character).isalnum() and character < 0x80) or character in b"+/":
            assert decode(bytes(text)) == base64.b64decode(text)
        elif character in b" \t\r\n":
            assert decode(bytes(text)) == decode(text.replace(bytes([character]), b""))
        elif character != ord("="):
            assert f"alphabet at position {place}" in refusal(bytes(text))


def test_line_breaks_and_blanks_are_skipped_wherever_they_are() -> None:
    data = bytes(range(256))
    assert decode(base64.encodebytes(data)) == data
    assert decode(base64.encodebytes(data).replace(b"\n", b"\r\n")) == data
    assert decode(b" Q\tU\r\nI = \n") == b"AB"
    assert decode(b" \r\n\t") == b""
    assert decode(b"QQ = = ") == b"A"


@pytest.mark.parametrize(
    ("source", "reason", "position"),
    [
        (b"QUJD!UJD", "a character outside the alphabet", 4),
        (b"QUJDQUJDQUJDQU-D", "a character outside the alphabet", 14),
        (b"QUJDQUJD_", "a character outside the alphabet", 8),
        (b"\x00", "a character outside the alphabet", 0),
        (b"QUJD\xff", "a character outside the alphabet", 4),
        (b"QUJD\x0bQUJD", "a character outside the alphabet", 4),
        ("QUJDé", "a character outside the alphabet", 4),
        (b"QQ==QQ==", "data after the padding", 4),
        (b"QUI=Q", "data after the padding", 4),
        (b"QQ===", "data after the padding", 4),
        (b"QQ=", "wrong padding", 3),
        (b"QQ=x", "wrong padding", 3),
        (b"Q===", "wrong padding", 1),
        (b"=", "wrong padding", 0),
        (b"QUJD====", "wrong padding", 4),
        (b"QUJDQ", "one character is left over", 5),
        (b"Q", "one character is left over", 1),
    ],
)
def test_what_is_not_base64_is_refused_by_position(source: bytes | str, reason: str, position: int) -> None:
    assert refusal(source) == f"base64: {reason} at position {position}"


def test_a_refusal_never_quotes_the_content() -> None:
    assert refusal("QUJD\ud800") == "base64: not ASCII"
    assert "secret" not in refusal("secret!")


@pytest.mark.parametrize("nbytes", range(1, 30))
def test_a_target_too_small_is_refused_and_not_overrun(nbytes: int) -> None:
    encoded = base64.b64encode(bytes(nbytes))
    for room in range(nbytes):
        target = bytearray([GUARD]) * 64
        with pytest.raises(ValueError, match="too small"):
            base64_decode_into(encoded, memoryview(target)[:room], 0)
        assert set(target[room:]) == {GUARD}
    exact = bytearray(nbytes)
    assert base64_decode_into(encoded, exact, 0) == nbytes


def test_a_target_offset_outside_the_target_is_refused() -> None:
    target = bytearray(8)
    assert base64_decode_into(b"", target, 8) == 0
    for offset in (-1, 9, 2**64):
        with pytest.raises(ValueError, match="offset"):
            base64_decode_into(b"", target, offset)
    with pytest.raises(BufferError):
        base64_decode_into(b"QUJD", bytes(8), 0)
    with pytest.raises(TypeError):
        base64_decode_into(17, target, 0)  # type: ignore[arg-type]


def test_any_buffer_may_be_source_or_target() -> None:
    with mmap.mmap(-1, 4096) as memory:
        assert base64_decode_into(memoryview(b"xQUJDx")[1:5], memory, 100) == 3
        assert memory[99:104] == b"\0ABC\0"


def test_decoded_bytes_is_the_bound_of_the_length_alone() -> None:
    assert [base64_decoded_bytes(b"Q" * n) for n in range(9)] == [0, 0, 1, 2, 3, 3, 4, 5, 6]
    assert base64_decoded_bytes("!!!!") == 3


def test_two_threads_may_decode_the_same_source() -> None:
    data = bytes(range(256)) * 4096
    encoded = base64.b64encode(data).decode()
    targets = [bytearray(len(data)) for _ in range(4)]
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(lambda target: base64_decode_into(encoded, target, 0), targets)) == {len(data)}
    assert all(target == data for target in targets)


@given(
    st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 300), st.sampled_from("\r\n \t")), max_size=8)
)
def test_blanks_anywhere_change_nothing(data: bytes, blanks: list[tuple[int, str]]) -> None:
    encoded = base64.b64encode(data).decode()
    for position, blank in blanks:
        encoded = encoded[:position] + blank + encoded[position:]
    assert decode(encoded) == data


BASE64 = re.compile(rb"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}(==)?|[A-Za-z0-9+/]{3}=?)?\Z")


@given(
    st.lists(
        st.sampled_from([b"QUJD", b"QUJDQUJD", b"Q", b"=", b"==", b"/", b"+", b" ", b"\n", b"!", b"\x80"])
    )
)
def test_any_mixture_is_decoded_as_the_grammar_says_or_refused(parts: list[bytes]) -> None:
    source = b"".join(parts)
    plain = source.translate(None, b"\r\n\t ")
    if BASE64.match(plain) is None:
        refusal(source, room=len(source))
    else:
        assert decode(source) == base64.b64decode(plain.rstrip(b"=") + b"=" * (-len(plain.rstrip(b"=")) % 4))


@given(st.binary(max_size=64), st.integers(0, 48))
def test_arbitrary_bytes_never_write_outside_the_target(source: bytes, room: int) -> None:
    target = bytearray([GUARD]) * 64
    try:
        written = base64_decode_into(source, memoryview(target)[:room], 0)
    except ValueError:
        written = room
    assert set(target[written:]) <= {GUARD}
