"""shm._core.keyed_digest: equal to SipHash-1-3 with 128 bits as its authors write it down."""

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm._core import keyed_digest

MASK = (1 << 64) - 1
KEY = bytes(range(16))


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & MASK


def rounds(v: list[int], count: int) -> list[int]:
    a, b, c, d = v
    for _ in range(count):
        a = (a + b) & MASK
        b = rotated(b, 13) ^ a
        a = rotated(a, 32)
        c = (c + d) & MASK
        d = rotated(d, 16) ^ c
        a = (a + d) & MASK
        d = rotated(d, 21) ^ a
        c = (c + b) & MASK
        b = rotated(b, 17) ^ c
        c = rotated(c, 32)
    return [a, b, c, d]


def siphash(key: bytes, text: bytes, compression: int, finalization: int, wide: bool = True) -> bytes:
    """The reference: SipHash-c-d of 64 or 128 bits."""
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    if wide:
        v[1] ^= 0xEE
    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) & 0xFF])
    for position in range(0, len(padded), 8):
        word = int.from_bytes(padded[position : position + 8], "little")
        v[3] ^= word
        v = rounds(v, compression)
        v[0] ^= word
    v[2] ^= 0xEE if wide else 0xFF
    v = rounds(v, finalization)
    digest = (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")
    if wide:
        v[1] ^= 0xDD
        v = rounds(v, finalization)
        digest += (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")
    return digest


def test_the_reference_gives_the_value_in_the_appendix_of_the_paper() -> None:
    digest = siphash(KEY, bytes(range(15)), 2, 4, wide=False)
    assert int.from_bytes(digest, "little") == 0xA129CA6149BE45E5


@pytest.mark.parametrize("nbytes", [*range(34), 255, 256, 257, 5000])
def test_every_length_has_the_digest_of_the_reference(nbytes: int) -> None:
    text = bytes((7 * n + nbytes) & 0xFF for n in range(nbytes))
    assert keyed_digest(KEY, [text]) == siphash(KEY, text, 1, 3)


@given(st.binary(min_size=16, max_size=16), st.lists(st.binary(max_size=30), max_size=8))
def test_the_borders_of_the_pieces_do_not_count(key: bytes, pieces: list[bytes]) -> None:
    assert keyed_digest(key, [*pieces]) == siphash(key, b"".join(pieces), 1, 3)


def test_every_bit_of_key_and_text_changes_about_half_of_the_digest() -> None:
    text = bytes(range(40))
    before = int.from_bytes(keyed_digest(KEY, [text]), "little")
    for source in (KEY, text):
        for bit in range(8 * len(source)):
            changed = (int.from_bytes(source, "little") ^ 1 << bit).to_bytes(len(source), "little")
            key, other = (changed, text) if source is KEY else (KEY, changed)
            differing = (int.from_bytes(keyed_digest(key, [other]), "little") ^ before).bit_count()
            assert 24 < differing < 104


def test_texts_of_zeros_differ_by_their_length() -> None:
    assert len({keyed_digest(KEY, [bytes(nbytes)]) for nbytes in range(600)}) == 600


def test_threads_do_not_disturb_each_other() -> None:
    texts = [secrets.token_bytes(200_000) for _ in range(4)] * 4
    alone = [keyed_digest(KEY, [text]) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: keyed_digest(KEY, [text]), texts)) == alone


def test_what_is_no_key_and_no_list_of_buffers_is_refused() -> None:
    for nbytes in (0, 15, 17):
        with pytest.raises(ValueError, match="16 bytes"):
            keyed_digest(bytes(nbytes), [b"text"])
    with pytest.raises(TypeError):
        keyed_digest(KEY, ["text"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        keyed_digest(KEY, (b"text",))  # type: ignore[arg-type]
