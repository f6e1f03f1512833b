"""mm_items -> one input block with every item's bytes, and the digest of them.

Called by `app.encode`. A block is [msgpack RequestMetadata, padded to a page][item bytes ...]. Sizes are
known as upper bounds before any byte is decoded, so one allocation serves the request; base64 is decoded
straight into it, in a thread and without the GIL when it is large.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from app.config import ServeConfig
from app.errors import InvalidItem, ItemTooLarge, MemoryFull
from app.fetch import FetchHold, MediaFetcher
from app.files import LocalFile, LocalMedia
from app.items import CompositeItem, Item
from app.sources import InlineItem, LocalItem, RemoteItem, Source
from app.tensors import TensorsContent, tensors_layout
from app.threads import run_to_the_end
from shm._core import base64_decode_into, keyed_digest
from shm.arena import InputArena, InputBlock
from shm.layout import page_align
from shm.messages import PARTED_KINDS, ItemKind, ItemSource, Part, RequestMetadata

# Below this a thread costs more than the decode.
INLINE_DECODE_BYTES: Final = 64 * 1024
ITEM_ALIGNMENT_BYTES: Final = 64
# base64 may be wrapped (CR, LF every 76 characters): room beyond 4/3 before it is refused unread.
BASE64_SLACK: Final = 1.05
# Of this process only: clients, who do not know it, cannot make two contents of one digest.
_DIGEST_KEY: Final = secrets.token_bytes(16)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Packed:
    """A filled block. It is freed when pack's context ends, unless block.hand_over() was called."""

    block: InputBlock
    metadata_bytes: int
    item_count: int
    item_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What an item is made of: so many files, one after the other among the contents."""

    kind: ItemKind = "media"
    files: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def source(self, parts: list[Part]) -> ItemSource:
        """As the worker reads it, its files being parts."""
        start = parts[0].offset
        span = parts[-1].offset + parts[-1].nbytes - start
        return ItemSource(start, span, self.kind, parts if self.kind in PARTED_KINDS else [], self.options)


class Content(Protocol):
    """One item's bytes, not yet in the block."""

    @property
    def bound_bytes(self) -> int:
        """Upper bound of what load_into writes."""

    def load_into(self, target: memoryview) -> int:
        """Write at most bound_bytes into target; bytes written. May run in a thread."""


@dataclass(frozen=True, slots=True)
class InlineContent:
    """base64 or percent-encoded ASCII text; a view is of the request's body."""

    item: InlineItem
    index: int
    bound_bytes: int

    def load_into(self, target: memoryview) -> int:
        """Decode; InvalidItem with the position of the first bad character."""
        text = self.item.text[self.item.start :]
        if not self.item.is_base64:
            return _copy(_unquoted(text), target)
        try:
            return _decode(text, target)
        except ValueError as error:
            raise InvalidItem(
                f"mm_items[{self.index}] is not valid base64: {error}", item_index=self.index
            ) from None


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """What a media host sent."""

    content: bytearray

    @property
    def bound_bytes(self) -> int:
        """Exact."""
        return len(self.content)

    def load_into(self, target: memoryview) -> int:
        """Copy."""
        return _copy(self.content, target)


@dataclass(frozen=True, slots=True)
class FileContent:
    """An open local file."""

    file: LocalFile

    @property
    def bound_bytes(self) -> int:
        """The size when it was opened."""
        return self.file.size_bytes

    def load_into(self, target: memoryview) -> int:
        """Read."""
        return self.file.read_into(target)


class Ingest:
    """Turns items into packed blocks. Holds no state beyond what it was given."""

    def __init__(self, config: ServeConfig, fetcher: MediaFetcher) -> None:
        self._max_item_bytes = config.max_item_bytes
        self._fetcher = fetcher
        self._local = LocalMedia(config.allowed_local_media_path, config.max_item_bytes)

    @asynccontextmanager
    async def pack(self, modality: str, items: list[Item], arena: InputArena) -> AsyncIterator[Packed]:
        """The items in a block of the arena. items is emptied, so that their text does not outlive the copy.

        InvalidItem, ItemRefused, ItemUnavailable ... name the item; MemoryFull when the arena is full now,
        ItemTooLarge when it could never hold the request.
        """
        shapes = [_shape(item) for item in items]
        with ExitStack() as sources:
            contents = await self._open_all(items, sources)
            offsets, total_bytes = _lay_out(modality, shapes, [content.bound_bytes for content in contents])
            block = allocate_input(arena, total_bytes)
            with block:
                fill = partial(_fill, block.view, modality, shapes, contents, offsets, self._max_item_bytes)
                if total_bytes - offsets[0] <= INLINE_DECODE_BYTES:
                    sizes, digest = fill()
                else:
                    sizes, digest = await run_to_the_end(fill)
                del fill
                items.clear()
                contents.clear()
                sources.close()
                metadata = _metadata(modality, shapes, offsets, sizes)
                block.view[: len(metadata)] = metadata
                yield Packed(block, len(metadata), len(shapes), sum(sizes), digest)

    async def _open_all(self, items: list[Item], sources: ExitStack) -> list[Content]:
        """Contents in order; URLs are fetched together. sources closes what was opened."""
        files = [(file, index) for index, item in enumerate(items) for file in _files_of(item)]
        if all(isinstance(file, InlineItem | CompositeItem) for file, _ in files):
            return [self._open_inline(file, index) for file, index in files]
        hold = sources.enter_context(self._fetcher.hold())
        return await _gather_in_order([self._open(file, index, hold, sources) for file, index in files])

    async def _open(self, item: "_File", index: int, hold: FetchHold, sources: ExitStack) -> Content:
        match item:
            case RemoteItem(url):
                return FetchedContent(await self._fetcher.fetch(url, index, hold))
            case LocalItem(path):
                file = await run_to_the_end(partial(self._local.open, path, index))
                sources.callback(file.close)
                return FileContent(file)
            case _:
                return self._open_inline(item, index)

    def _open_inline(self, item: "_File", index: int) -> Content:
        """Of what came with the request itself."""
        if isinstance(item, InlineItem):
            return self._inline(item, index)
        assert isinstance(item, CompositeItem)
        arrays = [self._inline(array.source, index) for array in item.arrays]
        return TensorsContent(tensors_layout(item.arrays, index), arrays, index)

    def _inline(self, item: InlineItem, index: int) -> InlineContent:
        characters = len(item.text) - item.start
        bound_bytes = -(-characters // 4) * 3 if item.is_base64 else characters
        slack = BASE64_SLACK if item.is_base64 else 3.0
        if bound_bytes > self._max_item_bytes * slack:
            raise _too_large(index, self._max_item_bytes)
        if isinstance(item.text, str) and not item.text.isascii():
            raise InvalidItem(f"mm_items[{index}] is neither a URL, a path nor base64", item_index=index)
        return InlineContent(item, index, bound_bytes)


async def _gather_in_order(opening: list[Coroutine[None, None, Content]]) -> list[Content]:
    """Results in order; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in opening]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


# A file to load: a source, or the arrays of a processed item, which become one.
_File = Source | CompositeItem


def _files_of(item: Item) -> list[_File]:
    if not isinstance(item, CompositeItem):
        return [item]
    return [item] if item.arrays else list(item.sources)


def _shape(item: Item) -> Shape:
    if not isinstance(item, CompositeItem):
        return Shape()
    return Shape(item.kind, len(_files_of(item)), item.options)


def _item_of_file(shapes: list[Shape]) -> list[int]:
    """The number of the item that each file belongs to."""
    return [index for index, shape in enumerate(shapes) for _ in range(shape.files)]


def _lay_out(modality: str, shapes: list[Shape], bounds: list[int]) -> tuple[list[int], int]:
    """Each file's offset in the block, and the block's size. Nothing overlaps if every bound holds."""
    # Packed with the largest numbers that can stand there: msgpack integers only get shorter.
    options_bytes = sum(len(msgspec.msgpack.encode(shape.options)) for shape in shapes)
    room = page_align(64 * (len(bounds) + 1) + options_bytes)
    largest = sum(bounds) + len(bounds) * ITEM_ALIGNMENT_BYTES + room
    worst_case = msgspec.msgpack.encode(
        RequestMetadata(modality, [shape.source([Part(largest, largest)] * shape.files) for shape in shapes])
    )
    position = page_align(len(worst_case))
    offsets = []
    for bound in bounds:
        offsets.append(position)
        position += -(-bound // ITEM_ALIGNMENT_BYTES) * ITEM_ALIGNMENT_BYTES
    return offsets, position


def allocate_input(arena: InputArena, total_bytes: int) -> InputBlock:
    """A block for one request. ItemTooLarge if the arena could never hold it, MemoryFull if it cannot now."""
    block = arena.allocate(total_bytes)
    if block is not None:
        return block
    if total_bytes > arena.total_bytes:
        raise ItemTooLarge(f"the request needs {total_bytes} bytes; the arena holds {arena.total_bytes}")
    raise MemoryFull(f"the arena has no room for {total_bytes} bytes now", retry_after_s=1.0)


def _fill(
    view: memoryview,
    modality: str,
    shapes: list[Shape],
    contents: list[Content],
    offsets: list[int],
    max_item_bytes: int,
) -> tuple[list[int], bytes]:
    """Load every content at its offset; sizes, and the digest of all."""
    sizes = []
    for index, content, offset in zip(_item_of_file(shapes), contents, offsets, strict=True):
        size = content.load_into(view[offset : offset + content.bound_bytes])
        check_item_bytes(index, size, max_item_bytes)
        sizes.append(size)
    loaded = (view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
    return sizes, content_digest(modality, loaded, shapes)


def check_item_bytes(index: int, nbytes: int, max_item_bytes: int) -> None:
    """InvalidItem for an empty item, ItemTooLarge for one over the limit."""
    if nbytes == 0:
        raise InvalidItem(f"mm_items[{index}] is empty", item_index=index)
    if nbytes > max_item_bytes:
        raise _too_large(index, max_item_bytes)


def content_digest(modality: str, items: Iterable[memoryview], shapes: Iterable[Shape] = ()) -> bytes:
    """Of the modality and every file, each after its length; and of what the items are, if any is more than
    one file without options. Equal in this process for equal content alone: the digests are keyed."""
    pieces: list[bytes | memoryview] = [modality.encode()]
    for item in items:
        pieces += (len(item).to_bytes(8, "little"), item)
    described = [(shape.kind, shape.files, shape.options) for shape in shapes]
    if any(one != ("media", 1, {}) for one in described):
        pieces.append(msgspec.msgpack.encode(described, order="deterministic"))
    return keyed_digest(_DIGEST_KEY, pieces)


def _metadata(modality: str, shapes: list[Shape], offsets: list[int], sizes: list[int]) -> bytes:
    parts = iter([Part(offset, size) for offset, size in zip(offsets, sizes, strict=True)])
    sources = [shape.source([next(parts) for _ in range(shape.files)]) for shape in shapes]
    return msgspec.msgpack.encode(RequestMetadata(modality, sources))


def _decode(text: str | memoryview, target: memoryview) -> int:
    """base64, percent-encoded or not. Almost none is, so that is looked at only when the decoder stumbles."""
    try:
        return base64_decode_into(text, target, 0)
    except ValueError:
        unquoted = _unquoted(text)
        if len(unquoted) == len(text):
            raise
        return base64_decode_into(unquoted, target, 0)


def _unquoted(text: str | memoryview) -> bytes:
    return unquote_to_bytes(text if isinstance(text, str) else bytes(text))


def _copy(source: bytes | bytearray, target: memoryview) -> int:
    target[: len(source)] = source
    return len(source)


def _too_large(index: int, limit_bytes: int) -> ItemTooLarge:
    return ItemTooLarge(f"mm_items[{index}] is larger than {limit_bytes} bytes", item_index=index)
