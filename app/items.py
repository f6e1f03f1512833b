"""What an element of mm_items names: inline bytes, a URL to fetch, a local path, or several of them.

An object may say more than where its bytes are: {"url": ..., OPTION: ...} has processor options of its own,
{"frames": [...]} or {"images": [...]} are several pictures that are one item, {"processed": ...} is what the
model's processor gives, as a safetensors file or (see `app.tensors`) as arrays, which may also stand without
that key. Kimi's processors name their media, and so may items: {"type": "image", "image": one or a list} and
{"type": "video_chunk", "video_chunk": [...]}, the frames of a short video among pictures. No input or output
here.

Called by `app.schema`; `app.ingest` turns the result into bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec

from app.errors import InvalidItem, InvalidRequest
from app.sources import MAX_MEDIA_TYPE_CHARACTERS, InlineItem, Source, parse_text
from shm.messages import ItemKind

MAX_NESTING: Final = 4
URL_KEYS: Final = ("url", "image_url", "video_url", "audio_url", "image")
LIST_KEYS: Final = ("frames", "images")
PICTURE_KEYS: Final = ("image",)  # of one picture or several
CHUNK_KEY: Final = "video_chunk"  # and the type of such an item
PROCESSED_KEY: Final = "processed"
VIDEO_SUFFIXES: Final = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".ts", ".gif")
# Beside a URL these are no options of a processor.
NO_OPTIONS: Final = frozenset(("type", "content_hash", "uuid", "id"))
MAX_OPTIONS_BYTES: Final = 4096
MAX_FILES_OF_AN_ITEM: Final = 1024
MAX_ARRAYS: Final = 8
_ARRAY_KEYS: Final = frozenset(("dtype", "shape", "data"))
MAX_DIMENSIONS: Final = 8
_NO_TEXTS: Final[Mapping[str, memoryview]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NamedArray:
    """One array of a processed item: its safetensors type and shape, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: InlineItem


@dataclass(frozen=True, slots=True)
class CompositeItem:
    """An item that is more than one file without options; fields as in shm.messages.ItemSource.

    arrays: of kind "processed", where it is not a file, which then has no source.
    """

    kind: ItemKind
    sources: tuple[Source, ...]
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[NamedArray, ...] = ()


Item = Source | CompositeItem


def parse_items(
    value: object,
    max_items: int,
    texts: Mapping[str, memoryview] = _NO_TEXTS,
    *,
    lists_are_videos: bool = False,
) -> list[Item]:
    """mm_items as decoded JSON -> items in order, nested lists flattened. Errors name the element.

    texts: long strings by their placeholders, see `app.long_texts`. lists_are_videos: a list inside mm_items
    is one video's frames, unless its first entry is plainly a video itself.
    """
    found = _Collector(max_items, texts, lists_are_videos).collect(value)
    if not found:
        raise InvalidRequest("mm_items is empty")
    return found


class _Collector:
    """Walks through the nested lists of one request."""

    def __init__(self, max_items: int, texts: Mapping[str, memoryview], lists_are_videos: bool) -> None:
        self._max_items = max_items
        self._texts = texts
        self._lists_are_videos = lists_are_videos
        self._found: list[Item] = []

    def collect(self, value: object) -> list[Item]:
        """All items in order."""
        self._collect(value, "mm_items", 0)
        return self._found

    def _collect(self, value: object, name: str, depth: int) -> None:
        if not isinstance(value, list):
            self._add(name, lambda parser: parser.item(value))
            return
        if depth == MAX_NESTING:
            raise InvalidRequest(f"{name} is nested more than {MAX_NESTING} lists deep")
        if not value:
            raise InvalidRequest(f"{name} is empty")
        if self._lists_are_videos and depth > 0 and self._are_frames(value):
            self._add(name, lambda parser: parser.frames(value))
            return
        for index, element in enumerate(value):
            self._collect(element, f"{name}[{index}]", depth + 1)

    def _add(self, name: str, parse: Callable[["_ItemParser"], Item]) -> None:
        if len(self._found) == self._max_items:
            raise InvalidRequest(f"mm_items has more than {self._max_items} items")
        parser = _ItemParser(name, len(self._found), self._texts, for_videos=self._lists_are_videos)
        self._found.append(parse(parser))

    def _are_frames(self, elements: list[object]) -> bool:
        first = elements[0]
        if not isinstance(first, str):
            return False
        long_text = self._texts.get(first)
        head = first if long_text is None else str(long_text[:MAX_MEDIA_TYPE_CHARACTERS], "ascii")
        return not head.lower().startswith("data:video/") and not head.lower().endswith(VIDEO_SUFFIXES)


class _ItemParser:
    """Parses one element of mm_items: its name in messages, its place, and the request's long texts."""

    def __init__(self, name: str, index: int, texts: Mapping[str, memoryview], *, for_videos: bool) -> None:
        self._for_videos = for_videos
        self._name = name
        self._index = index
        self._texts = texts

    def item(self, value: object) -> Item:
        """Of any form."""
        if not isinstance(value, dict):
            return self._source(value, self._name)
        if PROCESSED_KEY in value:
            return self._processed(value[PROCESSED_KEY])
        if value and all(_is_array(one) for one in value.values()):
            return self._processed(value)
        is_chunk = CHUNK_KEY in value or value.get("type") == CHUNK_KEY
        for key in (CHUNK_KEY, *LIST_KEYS, *PICTURE_KEYS):
            if key in value and (key not in PICTURE_KEYS or isinstance(value[key], list)):
                return self._list(value, key, is_chunk=is_chunk)
        if is_chunk:
            raise InvalidItem(
                f"{self._name} is a {CHUNK_KEY} without a list of pictures", item_index=self._index
            )
        text, options = self._url_of(value, self._name)
        source = self._source(text, self._name)
        checked = self._options(options)
        return CompositeItem("media", (source,), checked) if checked else source

    def frames(self, value: list[object]) -> Item:
        """A bare list of a video's frames."""
        return CompositeItem("frames", self._sources(value, self._name))

    def _list(self, value: dict[str, object], key: str, *, is_chunk: bool) -> CompositeItem:
        """Several pictures. In a request for videos a chunk is a video like any other."""
        sources = self._sources(_flat(value[key]), f"{self._name}.{key}")
        options = self._options({name: one for name, one in value.items() if name != key})
        return CompositeItem("chunk" if is_chunk and not self._for_videos else "frames", sources, options)

    def _url_of(self, value: dict[str, object], name: str) -> tuple[str, dict[str, object]]:
        """The URL of an object, however deep it says it, and what is said beside it."""
        for key in URL_KEYS:
            if key in value:
                beside = {other: one for other, one in value.items() if other != key}
                inner = value[key]
                if isinstance(inner, dict):
                    text, options = self._url_of(inner, f"{name}.{key}")
                    return text, beside | options
                return _string(inner, name), beside
        known = ", ".join((*URL_KEYS, *LIST_KEYS, CHUNK_KEY, PROCESSED_KEY))
        raise InvalidRequest(f"{name} is an object with none of: {known}")

    def _sources(self, value: object, name: str) -> tuple[Source, ...]:
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"{name} must be a list of pictures")
        if len(value) > MAX_FILES_OF_AN_ITEM:
            raise InvalidRequest(f"{name} has {len(value)} entries; the limit is {MAX_FILES_OF_AN_ITEM}")
        return tuple(self._source(one, f"{name}[{place}]") for place, one in enumerate(value))

    def _source(self, value: object, name: str) -> Source:
        if isinstance(value, dict):
            value, _ = self._url_of(value, name)
        text = _string(value, name)
        long_text = self._texts.get(text)
        if long_text is None:
            return parse_text(text, text, name, self._index)
        return parse_text(long_text, str(long_text[:MAX_MEDIA_TYPE_CHARACTERS], "ascii"), name, self._index)

    def _options(self, beside: dict[str, object]) -> dict[str, Any]:
        """What stands beside the media, without what is none of a processor's business."""
        options = {name: value for name, value in beside.items() if name not in NO_OPTIONS}
        if len(msgspec.json.encode(options)) > MAX_OPTIONS_BYTES:
            raise InvalidItem(
                f"{self._name} has more than {MAX_OPTIONS_BYTES} bytes of options", item_index=self._index
            )
        return options

    def _processed(self, value: object) -> CompositeItem:
        """A safetensors file, or arrays by name."""
        name = f"{self._name}.{PROCESSED_KEY}"
        if not isinstance(value, dict):
            return CompositeItem(PROCESSED_KEY, (self._source(value, name),))
        if not 1 <= len(value) <= MAX_ARRAYS:
            raise InvalidRequest(f"{name} must have 1 to {MAX_ARRAYS} arrays")
        arrays = tuple(self._array(one, key, f"{name}.{key}") for key, one in value.items())
        return CompositeItem(PROCESSED_KEY, (), arrays=arrays)

    def _array(self, value: object, key: str, name: str) -> NamedArray:
        """{"dtype": "F32", "shape": [...], "data": base64}."""
        try:
            said = msgspec.convert(value, _Array)
        except msgspec.ValidationError as error:
            raise InvalidItem(f"{name}: {error}", item_index=self._index) from None
        source = self._source(said.data, f"{name}.data")
        if not isinstance(source, InlineItem):
            raise InvalidItem(f"{name}.data must be base64", item_index=self._index)
        return NamedArray(key, said.dtype, tuple(said.shape), source)


class _Array(msgspec.Struct, frozen=True):
    dtype: Literal["F32", "F16", "BF16", "I64", "I32", "BOOL"]
    shape: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]],
        msgspec.Meta(min_length=1, max_length=MAX_DIMENSIONS),
    ]
    data: str


def _flat(value: object, depth: int = 0) -> object:
    """A list without the lists in it, in order; whatever is no list, or nested too deep, as it is."""
    if not isinstance(value, list) or depth == MAX_NESTING:
        return value
    flat: list[object] = []
    for one in value:
        inner = _flat(one, depth + 1)
        flat += inner if isinstance(inner, list) else [inner]
    return flat


def _is_array(value: object) -> bool:
    return isinstance(value, dict) and value.keys() >= _ARRAY_KEYS


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string or an object with a url, got {_json_type(value)}")
    return value


def _json_type(value: object) -> str:
    names = {bool: "bool", int: "int", float: "float", list: "array", dict: "object"}
    return names.get(type(value), "null")
