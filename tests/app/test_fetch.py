"""app.fetch: media by URL from real servers, and everything that must not be fetched."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from app.config import ServeConfig
from app.errors import (
    InvalidItem,
    ItemHostFailed,
    ItemHostTimeout,
    ItemRefused,
    ItemTooLarge,
    ItemUnavailable,
    MemoryFull,
    RequestError,
)
from app.fetch import MediaFetcher
from tests.app.serving import Handler, config, raw_server, run

PRIVATE = config(allow_private_media=True)
BODY = b"picture bytes"


def answering(head: str, body: bytes = b"", seen: list[bytes] | None = None) -> Handler:
    """A server that reads one request's head and sends this answer."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            seen.append(request)
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return handle


def ok(body: bytes, *headers: str) -> str:
    return "\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers])


async def fetch(url: str, settings: ServeConfig = PRIVATE) -> bytes:
    async with MediaFetcher(settings) as fetcher:
        with fetcher.hold() as hold:
            content = bytes(await fetcher.fetch(url, 0, hold))
        assert fetcher.held_bytes == 0
    return content


def fetch_from(
    handler: Handler, settings: ServeConfig = PRIVATE, url: Callable[[int], str] | None = None
) -> bytes:
    async def main() -> bytes:
        async with raw_server(handler) as port:
            return await fetch(url(port) if url else f"http://127.0.0.1:{port}/x.png?token=1", settings)

    return run(main())


def test_a_body_arrives_and_the_request_looks_like_a_real_client() -> None:
    seen: list[bytes] = []
    assert fetch_from(answering(ok(BODY), BODY, seen)) == BODY
    request = seen[0].decode().lower()
    assert request.startswith("get /x.png?token=1 http/1.1\r\n")
    assert "accept-encoding: identity" in request
    assert "user-agent: mozilla" in request
    assert "httpx" not in request


def test_the_host_header_keeps_the_name_while_the_connection_goes_to_the_checked_address() -> None:
    seen: list[bytes] = []
    fetch_from(answering(ok(BODY), BODY, seen), url=lambda port: f"http://localhost:{port}/")
    assert b"\r\nhost: localhost:" in seen[0].lower()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_answer_is_undone(encoding: str) -> None:
    body = gzip.compress(BODY) if encoding == "gzip" else zlib.compress(BODY)
    assert fetch_from(answering(ok(body, f"Content-Encoding: {encoding}"), body)) == BODY


def test_a_compressed_bomb_stops_at_the_limit() -> None:
    bomb = gzip.compress(bytes(32 << 20))
    settings = config(allow_private_media=True, max_item_bytes=1 << 20)
    with pytest.raises(ItemTooLarge, match="1048576"):
        fetch_from(answering(ok(bomb, "Content-Encoding: gzip"), bomb), settings)


def test_an_endless_body_stops_at_the_limit() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    with pytest.raises(ItemTooLarge):
        fetch_from(endless, config(allow_private_media=True, max_item_bytes=1 << 20))


@pytest.mark.parametrize(
    ("head", "body", "error"),
    [
        ("HTTP/1.1 404 Not Found\nContent-Length: 0", b"", ItemUnavailable),
        ("HTTP/1.1 500 Oops\nContent-Length: 0", b"", ItemHostFailed),
        ("HTTP/1.1 429 Slow\nContent-Length: 0", b"", ItemHostFailed),
        ("HTTP/1.1 200 OK\nContent-Length: 0", b"", InvalidItem),
        ("HTTP/1.1 200 OK\nContent-Length: 100", b"half", ItemHostFailed),
        ("HTTP/1.1 200 OK\nContent-Length: 4\nContent-Encoding: gzip", b"nope", ItemHostFailed),
        ("HTTP/1.1 200 OK\nContent-Length: 4\nContent-Encoding: br", b"nope", ItemUnavailable),
        ("this is not HTTP", b"", ItemHostFailed),
    ],
)
def test_a_host_that_fails_is_named_by_what_it_did(head: str, body: bytes, error: type[RequestError]) -> None:
    with pytest.raises(error) as caught:
        fetch_from(answering(head, body))
    assert "mm_items[0]" in caught.value.message
    assert "token" not in caught.value.message


def test_a_truncated_gzip_stream_is_an_error_and_not_a_short_picture() -> None:
    body = gzip.compress(bytes(range(256)) * 64)[:-12]
    with pytest.raises(ItemHostFailed):
        fetch_from(answering(ok(body, "Content-Encoding: gzip"), body))


def test_a_host_that_does_not_answer_is_given_up() -> None:
    settings = config(allow_private_media=True, media_total_timeout_s=0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with pytest.raises(ItemHostTimeout, match=r"0\.05 s"):
        fetch_from(silent, settings)


def test_a_slow_drip_is_given_up_by_the_total() -> None:
    settings = config(allow_private_media=True, media_total_timeout_s=0.2)
    stop = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not stop.is_set() and not writer.is_closing():
            writer.write(b"x")
            try:
                async with asyncio.timeout(0.01):
                    await stop.wait()
            except TimeoutError:
                continue

    with pytest.raises(ItemHostTimeout):
        fetch_from(drip, settings)


def test_redirects_are_followed_three_times_and_relative_ones_too() -> None:
    async def chain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        left = int(request.split(b" ")[1].strip(b"/") or b"0")
        if left:
            writer.write(f"HTTP/1.1 302 F\r\nLocation: {left - 1}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
        await writer.drain()

    assert fetch_from(chain, url=lambda port: f"http://127.0.0.1:{port}/3") == b"done"
    with pytest.raises(ItemUnavailable, match="redirected more than 3"):
        fetch_from(chain, url=lambda port: f"http://127.0.0.1:{port}/4")


@pytest.mark.parametrize(
    "target",
    ["http://169.254.169.254/latest", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://u@127.0.0.1/"],
)
def test_a_redirect_is_checked_like_the_first_url(target: str) -> None:
    with pytest.raises(ItemRefused):
        fetch_from(answering(f"HTTP/1.1 302 Found\nLocation: {target}\nContent-Length: 0"))


@pytest.mark.parametrize("url", ["http://xn--/a", "http://xn--\u00fc/a"])
def test_a_host_that_is_no_international_name_is_named_as_such(url: str) -> None:
    with pytest.raises(InvalidItem, match="not a valid URL"):
        run(fetch(url, config()))


FORBIDDEN = [
    "http://127.0.0.1{}/", "http://localhost{}/", "http://2130706433{}/", "http://0x7f000001{}/",
    "http://0177.0.0.1{}/", "http://127.1{}/", "http://[::ffff:127.0.0.1]{}/", "http://[::1]{}/",
    "http://0.0.0.0{}/", "http://example.com@127.0.0.1{}/", "http://127.0.0.1{}\\@example.com/",
    "http://example.com\\@127.0.0.1{}/", "http://127.0.0.1{}#@example.com/", "http://[::]{}/",
    "http://127.0.0.1.{}/", "http://①②⑦.0.0.1{}/", "http://ｌocalhost{}/",
]  # fmt: skip


@pytest.mark.parametrize("pattern", FORBIDDEN)
@pytest.mark.parametrize("listed", [False, True])
def test_nothing_reaches_a_private_address(pattern: str, listed: bool) -> None:
    """Not one connection, whatever the spelling; not with the host on the list of domains either."""
    connections: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername"))

    async def main() -> None:
        async with raw_server(handle) as port:
            domains = (f"127.0.0.1:{port}", f"localhost:{port}") if listed else ()
            with pytest.raises((ItemRefused, InvalidItem, ItemUnavailable)):
                await fetch(pattern.format(f":{port}"), config(allowed_media_domains=domains))

    run(main())
    assert connections == []


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/meta-data/", "http://[fe80::1]/", "http://100.100.100.200/"]
)
def test_metadata_addresses_stay_closed_even_with_private_media_allowed(url: str) -> None:
    with pytest.raises(ItemRefused):
        run(fetch(url))


def test_other_ports_are_closed_unless_listed() -> None:
    with pytest.raises(ItemRefused, match="ports"):
        run(fetch("http://example.invalid:8080/", config()))


def test_a_domain_list_narrows_what_is_fetched() -> None:
    settings = config(allow_private_media=True, allowed_media_domains=("media.example",))
    with pytest.raises(ItemRefused, match="allowed-media-domains"):
        run(fetch("http://127.0.0.1/", settings))


def test_a_name_that_does_not_resolve_and_a_closed_port_are_said() -> None:
    with pytest.raises(ItemUnavailable, match="resolve"):
        run(fetch("http://no-such-host.invalid/x.png"))
    with pytest.raises(ItemHostFailed, match="reached"):
        run(fetch("http://127.0.0.1:9/x.png"))


def test_the_bytes_held_for_all_requests_are_bounded() -> None:
    async def main() -> None:
        async with MediaFetcher(config(arena_bytes=100)) as fetcher:
            with fetcher.hold() as first, fetcher.hold() as second, fetcher.hold() as third:
                first.add(50)
                with pytest.raises(ItemTooLarge):
                    first.add(1)
                second.add(50)
                with pytest.raises(MemoryFull):
                    third.add(1)
            assert fetcher.held_bytes == 0

    run(main())
