"""app.ingest: items become one block of a real arena."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from app.errors import InvalidItem, ItemRefused, ItemTooLarge, MemoryFull, RequestError
from app.fetch import MediaFetcher
from app.ingest import Ingest, content_digest
from app.items import Item, parse_items
from app.sources import InlineItem, LocalItem, RemoteItem
from app.threads import run_to_the_end
from shm.arena import InputArena, create_arena
from shm.messages import RequestMetadata
from shm.region import Backing
from tests.app.serving import config, raw_server, run

MEBIBYTE = 1 << 20
SETTINGS = config(max_item_bytes=MEBIBYTE, allow_private_media=True)


@pytest.fixture
def arena() -> Iterator[InputArena]:
    with create_arena(8 * MEBIBYTE, boot_id=secrets.token_bytes(16), backing=Backing.MEMFD) as region:
        yield InputArena(region)


def data_url(content: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(content).decode()


def pack(arena: InputArena, items: list[Item], settings: Any = SETTINGS) -> tuple[list[bytes], bytes, int]:
    """The items' bytes as a worker finds them, the digest, and how many item bytes were counted."""

    async def main() -> tuple[list[bytes], bytes, int]:
        async with (
            MediaFetcher(settings) as fetcher,
            Ingest(settings, fetcher).pack("image", items, arena) as packed,
        ):
            view = packed.block.view
            metadata = msgspec.msgpack.decode(view[: packed.metadata_bytes], type=RequestMetadata)
            assert metadata.modality == "image"
            assert packed.item_count == len(metadata.items)
            found = [bytes(view[source.offset : source.offset + source.nbytes]) for source in metadata.items]
            return found, packed.digest, packed.item_bytes

    result = run(main())
    statistics = arena.statistics()
    assert statistics.free_bytes == statistics.total_bytes
    return result


def digest_of(*contents: bytes) -> bytes:
    return content_digest("image", [memoryview(content) for content in contents])


def test_a_digest_tells_modality_borders_and_order_of_the_contents() -> None:
    sequences = [(b"ab", b"c"), (b"a", b"bc"), (b"c", b"ab"), (b"abc",), (b"ab", b"c", b"")]
    digests = {digest_of(*contents) for contents in sequences}
    digests.add(content_digest("video", [memoryview(b"abc")]))
    assert len(digests) == 6
    assert digest_of(b"ab", b"c") in digests


def test_another_process_has_other_digests() -> None:
    script = (
        "from app.ingest import content_digest; print(content_digest('image', [memoryview(b'ab')]).hex())"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(finished.stdout.strip()) == 32
    assert finished.stdout.strip() != digest_of(b"ab").hex()


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 2), (100_000, 7), (700_000, 700_000), (5,) * 300])
def test_every_item_lies_in_the_block_in_order(arena: InputArena, sizes: tuple[int, ...]) -> None:
    contents = [os.urandom(size) for size in sizes]
    items = parse_items([data_url(content) for content in contents], 1024)
    found, digest, item_bytes = pack(arena, items)
    assert found == contents
    assert digest == digest_of(*contents)
    assert item_bytes == sum(sizes)
    assert items == []


def test_all_sources_can_stand_in_one_request(arena: InputArena, tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(b"from a file")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nby fetch")
        await writer.drain()

    settings = config(allow_private_media=True, allowed_local_media_path=str(tmp_path))

    async def main() -> list[bytes]:
        async with raw_server(handle) as port, MediaFetcher(settings) as fetcher:
            items: list[Item] = [
                LocalItem(str(tmp_path / "f.bin")),
                RemoteItem(f"http://127.0.0.1:{port}/"),
                InlineItem("data:,by%20percent", 6, is_base64=False),
            ]
            async with Ingest(settings, fetcher).pack("image", items, arena) as packed:
                view = packed.block.view
                metadata = msgspec.msgpack.decode(view[: packed.metadata_bytes], type=RequestMetadata)
                return [bytes(view[one.offset : one.offset + one.nbytes]) for one in metadata.items]

    assert run(main()) == [b"from a file", b"by fetch", b"by percent"]


def test_percent_signs_in_base64_are_undone(arena: InputArena) -> None:
    found, _, _ = pack(arena, parse_items(["data:;base64,QUI%3D"], 1))
    assert found == [b"AB"]


@pytest.mark.parametrize(
    ("item", "error", "named"),
    [
        ("data:;base64,@@@@", InvalidItem, r"mm_items\[1\] is not valid base64"),
        ("data:;base64,data:;base64,QUI=", InvalidItem, "base64"),
        ("not base64 at all!", InvalidItem, "base64"),
        ("ünïcode", InvalidItem, r"mm_items\[1\]"),
        ("data:;base64,====", InvalidItem, r"mm_items\[1\]"),
        ("data:;base64, ", InvalidItem, "empty"),
        ("/etc/hostname", ItemRefused, r"mm_items\[1\]"),
    ],
)
def test_a_bad_item_is_named_and_the_block_comes_back(
    arena: InputArena, item: str, error: type[RequestError], named: str
) -> None:
    with pytest.raises(error, match=named) as caught:
        pack(arena, parse_items([data_url(b"fine"), item], 2))
    assert caught.value.item_index == 1
    assert arena.statistics().free_bytes == arena.statistics().total_bytes


@pytest.mark.parametrize("excess", [1, 100, MEBIBYTE])
def test_an_item_over_the_limit_is_refused_with_the_limit(arena: InputArena, excess: int) -> None:
    with pytest.raises(ItemTooLarge, match=str(MEBIBYTE)):
        pack(arena, parse_items([data_url(bytes(MEBIBYTE + excess))], 1))


def test_an_item_of_exactly_the_limit_passes_wrapped_or_not(arena: InputArena) -> None:
    content = os.urandom(MEBIBYTE)
    wrapped = "data:;base64," + base64.encodebytes(content).decode()
    for text in (data_url(content), wrapped):
        found, _, _ = pack(arena, parse_items([text], 1))
        assert found == [content]


def test_a_full_arena_is_503_and_a_request_larger_than_the_arena_is_413(arena: InputArena) -> None:
    settings = config(max_item_bytes=16 * MEBIBYTE)
    with pytest.raises(ItemTooLarge, match="arena"):
        pack(arena, parse_items([data_url(bytes(9 * MEBIBYTE))], 1), settings)
    taken = arena.allocate(7 * MEBIBYTE)
    assert taken is not None
    with pytest.raises(MemoryFull) as caught:
        pack(arena, parse_items([data_url(bytes(2 * MEBIBYTE))], 1), settings)
    assert caught.value.retry_after_s
    taken.free()


def test_a_block_that_was_handed_over_stays(arena: InputArena) -> None:
    async def main() -> None:
        async with MediaFetcher(SETTINGS) as fetcher:
            items = parse_items([data_url(b"x")], 1)
            async with Ingest(SETTINGS, fetcher).pack("image", items, arena) as packed:
                block = packed.block.hand_over()
            assert arena.statistics().free_bytes < arena.statistics().total_bytes
            block.free()

    run(main())


def test_a_cancelled_caller_waits_for_the_thread_that_still_writes() -> None:
    """Two cancellations, and the work is done before the caller sees the first."""
    started, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait()
        finished.set()

    async def main() -> None:
        task = asyncio.create_task(run_to_the_end(work))
        await asyncio.get_running_loop().run_in_executor(None, started.wait)
        for _ in range(2):
            task.cancel()
            await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finished.is_set()

    run(main())


def sources_of(arena: InputArena, items: list[Item]) -> tuple[RequestMetadata, list[list[bytes]], bytes]:
    """What the worker is told, each item's files, and the digest."""

    async def main() -> tuple[RequestMetadata, list[list[bytes]], bytes]:
        async with (
            MediaFetcher(SETTINGS) as fetcher,
            Ingest(SETTINGS, fetcher).pack("video", items, arena) as packed,
        ):
            view = packed.block.view
            metadata = msgspec.msgpack.decode(view[: packed.metadata_bytes], type=RequestMetadata)
            files = [
                [bytes(view[one.offset : one.offset + one.nbytes]) for one in source.parts or [source]]
                for source in metadata.items
            ]
            return metadata, files, packed.digest

    return run(main())


def test_frames_and_options_reach_the_worker(arena: InputArena) -> None:
    frames = {"frames": [data_url(b"one"), data_url(b"the second")], "fps": 4}
    metadata, files, digest = sources_of(arena, parse_items([data_url(b"plain"), frames], 4))
    assert files == [[b"plain"], [b"one", b"the second"]]
    assert [(source.kind, source.options) for source in metadata.items] == [
        ("media", {}),
        ("frames", {"fps": 4}),
    ]
    other = sources_of(arena, parse_items([data_url(b"plain"), {**frames, "fps": 5}], 4))[2]
    assert digest != other


def test_a_chunk_is_other_content_than_the_same_pictures(arena: InputArena) -> None:
    pictures = [data_url(b"one"), data_url(b"the second")]
    chunk, files, digest = sources_of(arena, parse_items({"video_chunk": pictures}, 1))
    assert files == [[b"one", b"the second"]]
    assert [source.kind for source in chunk.items] == ["chunk"]
    assert digest != sources_of(arena, parse_items({"images": pictures}, 1))[2]


def test_arrays_become_a_safetensors_file(arena: InputArena) -> None:
    values = np.arange(6, dtype="<f4")
    grid = np.array([[1, 2, 3]], dtype="<i8")
    arrays = {
        "pixel_values": {"dtype": "F32", "shape": [3, 2], "data": base64_of(values)},
        "image_grid_thw": {"dtype": "I64", "shape": [1, 3], "data": base64_of(grid)},
    }
    metadata, files, _ = sources_of(arena, parse_items([{"processed": arrays}], 1))
    assert metadata.items[0].kind == "processed"
    tensors = safetensors.numpy.load(files[0][0])
    assert np.array_equal(tensors["pixel_values"], values.reshape(3, 2))
    assert np.array_equal(tensors["image_grid_thw"], grid)


def test_an_array_of_another_length_than_it_says_is_refused(arena: InputArena) -> None:
    array = {"dtype": "F32", "shape": [2, 2], "data": base64_of(np.zeros(5, "<f4"))}
    with pytest.raises(InvalidItem, match="must be 16 bytes"):
        sources_of(arena, parse_items([{"processed": {"pixel_values": array}}], 1))


def base64_of(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
