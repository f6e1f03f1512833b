"""What an element of mm_items names: inline bytes, a URL to fetch, or a local path. No input or output here.

Called by `app.schema`; `app.ingest` turns the result into bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from app.errors import InvalidItem, InvalidRequest, ItemRefused

MAX_NESTING: Final = 4
MAX_URL_CHARACTERS: Final = 8192
MAX_PATH_CHARACTERS: Final = 4096
MAX_MEDIA_TYPE_CHARACTERS: Final = 512
URL_KEYS: Final = ("url", "image_url", "video_url", "audio_url")
# A slash begins an absolute path, but also the base64 of a JPEG and of one other content in 64.
JPEG_BASE64_PREFIX: Final = "/9j/"
SHORTEST_SLASHED_BASE64: Final = 128
_NO_TEXTS: Final[Mapping[str, memoryview]] = MappingProxyType({})
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


Item = InlineItem | RemoteItem | LocalItem


def parse_items(value: object, max_items: int, texts: Mapping[str, memoryview] = _NO_TEXTS) -> list[Item]:
    """mm_items as decoded JSON -> items in order, nested lists flattened. Errors name the element.

    texts: long strings by their placeholders, see `app.long_texts`.
    """
    found: list[Item] = []
    _collect(value, "mm_items", 0, found, max_items, texts)
    if not found:
        raise InvalidRequest("mm_items is empty")
    return found


def _collect(
    value: object, name: str, depth: int, found: list[Item], max_items: int, texts: Mapping[str, memoryview]
) -> None:
    if isinstance(value, list):
        if depth == MAX_NESTING:
            raise InvalidRequest(f"{name} is nested more than {MAX_NESTING} lists deep")
        if not value:
            raise InvalidRequest(f"{name} is empty")
        for index, element in enumerate(value):
            _collect(element, f"{name}[{index}]", depth + 1, found, max_items, texts)
        return
    if len(found) == max_items:
        raise InvalidRequest(f"mm_items has more than {max_items} items")
    text = _text_of(value, name)
    long_text = texts.get(text)
    if long_text is None:
        found.append(_parse_text(text, text, name, len(found)))
    else:
        head = str(long_text[:MAX_MEDIA_TYPE_CHARACTERS], "ascii")
        found.append(_parse_text(long_text, head, name, len(found)))


def _text_of(value: object, name: str) -> str:
    if isinstance(value, dict):
        for key in URL_KEYS:
            if key in value:
                inner = value[key]
                return _text_of(inner, f"{name}.{key}") if isinstance(inner, dict) else _string(inner, name)
        raise InvalidRequest(f"{name} is an object with none of: {', '.join(URL_KEYS)}")
    return _string(value, name)


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string or an object with a url, got {_json_type(value)}")
    return value


def _json_type(value: object) -> str:
    names = {bool: "bool", int: "int", float: "float", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _parse_text(text: str | memoryview, head: str, name: str, index: int) -> Item:
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
