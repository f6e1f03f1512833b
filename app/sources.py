"""What one string of a request names: inline bytes, a URL to fetch or a local path. No input or output here.

Called by `app.items`; `app.ingest` reads the bytes.
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from app.errors import InvalidItem, ItemRefused

MAX_URL_CHARACTERS: Final = 8192
MAX_PATH_CHARACTERS: Final = 4096
MAX_MEDIA_TYPE_CHARACTERS: Final = 512
# A slash begins an absolute path, but also the base64 of a JPEG and of one other content in 64.
JPEG_BASE64_PREFIX: Final = "/9j/"
SHORTEST_SLASHED_BASE64: Final = 128
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True, slots=True)
class InlineItem:
    """Bytes inside the request: text from `start` on, base64 or percent-encoded. A long text is a view of
    the request's body, printable ASCII."""

    text: str | memoryview
    start: int
    is_base64: bool


@dataclass(frozen=True, slots=True)
class RemoteItem:
    """An http or https URL, unchecked."""

    url: str


@dataclass(frozen=True, slots=True)
class LocalItem:
    """An absolute path on this machine, unchecked."""

    path: str


Source = InlineItem | RemoteItem | LocalItem


def parse_text(text: str | memoryview, head: str, name: str, index: int) -> Source:
    """head: the text itself, or the beginning of a view, which is longer than any URL or path may be."""
    if not text:
        raise InvalidItem(f"{name} is an empty string", item_index=index)
    start = head[:8].lower()
    if start.startswith("data:"):
        return _parse_data_url(text, head, name, index)
    if start.startswith(("http://", "https:/")):
        if len(text) > MAX_URL_CHARACTERS:
            raise InvalidItem(
                f"{name} is a URL of more than {MAX_URL_CHARACTERS} characters", item_index=index
            )
        return RemoteItem(head)
    if start.startswith("file:"):
        if len(text) > MAX_URL_CHARACTERS:
            raise InvalidItem(f"{name} is a file URL without an absolute path", item_index=index)
        return _parse_file_url(head, name, index)
    if head[0] == "/" and len(text) <= MAX_PATH_CHARACTERS and _is_path(head):
        return LocalItem(head)
    if "://" in head[:32]:
        raise ItemRefused(f"{name} has a scheme that is not allowed: http, https, data", item_index=index)
    return InlineItem(text, 0, is_base64=True)


def _is_path(text: str) -> bool:
    """Of a text that begins with a slash. Whatever this says, only `app.files` decides what may be opened."""
    if text.startswith(JPEG_BASE64_PREFIX):
        return False
    could_be_base64 = len(text) >= SHORTEST_SLASHED_BASE64 and len(text) % 4 == 0
    return not (could_be_base64 and _BASE64.fullmatch(text))


def _parse_data_url(text: str | memoryview, head: str, name: str, index: int) -> InlineItem:
    """RFC 2397: data:[type][;parameters][;base64],payload. The type is ignored: content decides."""
    comma = head.find(",", 0, MAX_MEDIA_TYPE_CHARACTERS)
    if comma < 0:
        raise InvalidItem(f"{name} is a data URL without a comma", item_index=index)
    if comma + 1 == len(text):
        raise InvalidItem(f"{name} is empty: a data URL without a payload", item_index=index)
    last_parameter = head[5:comma].rpartition(";")[2].strip().lower()
    return InlineItem(text, comma + 1, is_base64=last_parameter == "base64")


def _parse_file_url(text: str, name: str, index: int) -> LocalItem:
    rest = text[5:]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise ItemRefused(f"{name} is a file URL on another host", item_index=index)
        rest = slash + path
    path = unquote(rest)
    if not path.startswith("/") or len(path) > MAX_PATH_CHARACTERS:
        raise InvalidItem(f"{name} is a file URL without an absolute path", item_index=index)
    return LocalItem(path)
