"""A JSON body without its long strings: what media inside a request would cost the decoder is not spent.

Decoding JSON makes a Python object of every string and holds the interpreter lock meanwhile: 4 ms for each
megabyte of base64. So the long strings are found in C without it, the rest is decoded with a short
placeholder in place of each, and `app.ingest` takes the characters from where they lie in the body.
Called by `app.encode`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from app.threads import run_to_the_end
from shm._core import find_long_strings

LONG_BYTES: Final = 64 << 10
# Finding takes about a millisecond for four megabytes; above it is a thread's work.
SCAN_INLINE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class SplitBody:
    """json is the body with placeholders. texts: placeholder -> the characters, printable ASCII, a view of
    the body. A placeholder cannot be guessed, so no client can name another string by it."""

    json: bytes | bytearray
    texts: Mapping[str, memoryview] = field(default_factory=dict)


async def split_body(body: bytearray) -> SplitBody:
    """The body must not change as long as the result lives."""
    if len(body) < LONG_BYTES:
        return SplitBody(body)
    find = partial(find_long_strings, body, LONG_BYTES)
    return cut(body, find() if len(body) <= SCAN_INLINE_BYTES else await run_to_the_end(find))


def cut(body: bytearray, extents: list[tuple[int, int]]) -> SplitBody:
    """The body without these strings."""
    view = memoryview(body)
    nonce = secrets.token_hex(16)
    pieces: list[bytes | memoryview] = []
    texts = {}
    position = 0
    for number, (start, end) in enumerate(extents):
        placeholder = f"{nonce}:{number}"
        texts[placeholder] = view[start:end]
        pieces += (view[position:start], placeholder.encode())
        position = end
    return SplitBody(b"".join([*pieces, view[position:]]), texts)
