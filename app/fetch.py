"""Media by URL, under policy: checked addresses only, few redirects, byte and time limits.

One MediaFetcher per daemon, used by `app.ingest`. httpx is loaded with the first URL. The name is resolved
once, every address in the answer must pass `app.addresses`, and the connection goes to the address that was
checked (Host and SNI keep the name), so a second answer of the name server changes nothing.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from app.addresses import Address, may_connect
from app.config import ServeConfig
from app.errors import (
    InvalidItem,
    ItemHostFailed,
    ItemHostTimeout,
    ItemRefused,
    ItemTooLarge,
    ItemUnavailable,
    MemoryFull,
)
from app.resolver import Resolver

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS: Final = 3
MAX_FETCHES: Final = 64
MAX_FETCHES_PER_HOST: Final = 8
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
RETRYABLE_STATUSES: Final = frozenset({408, 425, 429})
USER_AGENT: Final = "Mozilla/5.0 (compatible; encoderd/0.1; multimodal media fetch)"
_FORBIDDEN_IN_URLS: Final = frozenset("\\ \t\r\n\x00")


class FetchHold:
    """Bytes of one request's fetched media, counted while they are in private memory."""

    def __init__(self, fetcher: "MediaFetcher", limit_bytes: int) -> None:
        self._fetcher = fetcher
        self._limit_bytes = limit_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fetcher.held_bytes -= self._held_bytes

    def add(self, nbytes: int) -> None:
        """Count nbytes more: ItemTooLarge over this request's share, MemoryFull over the daemon's."""
        if self._held_bytes + nbytes > self._limit_bytes:
            raise ItemTooLarge(f"the media of this request are larger than {self._limit_bytes} bytes")
        if self._fetcher.held_bytes + nbytes > self._fetcher.limit_bytes:
            raise MemoryFull("too many media are being fetched", retry_after_s=1.0)
        self._held_bytes += nbytes
        self._fetcher.held_bytes += nbytes


class _HostSlots:
    """One host's share of the fetches; lives while somebody uses it."""

    def __init__(self) -> None:
        self.users = 0
        self.slots = asyncio.Semaphore(MAX_FETCHES_PER_HOST)


class MediaFetcher:
    """Async context manager that owns the HTTP client and every limit of fetching."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._client: httpx.AsyncClient | None = None
        self._resolver = Resolver()
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._hosts: dict[str, _HostSlots] = {}
        self.held_bytes = 0
        self.limit_bytes = config.arena_bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()

    def hold(self) -> FetchHold:
        """The account of one request; half of the arena is its share."""
        return FetchHold(self, self._config.arena_bytes // 2)

    async def fetch(self, text: str, index: int, hold: FetchHold) -> bytearray:
        """The bytes at this URL. Every failure is an error that names mm_items[index]."""
        url = self._parse(text, index)
        total_s = self._config.media_total_timeout_s
        async with self._slot_for(url.host):
            try:
                async with asyncio.timeout(total_s):
                    return await self._follow(url, index, hold)
            except TimeoutError:
                raise ItemHostTimeout(
                    f"mm_items[{index}]: the media host took longer than {total_s:g} s", item_index=index
                ) from None

    @asynccontextmanager
    async def _slot_for(self, host: str) -> AsyncIterator[None]:
        entry = self._hosts.setdefault(host, _HostSlots())
        entry.users += 1
        try:
            async with entry.slots, self._slots:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._hosts[host]

    def _parse(self, text: str, index: int) -> "httpx.URL":
        """The one parse: what is checked here is the object that is dialled."""
        import httpx

        if not _FORBIDDEN_IN_URLS.isdisjoint(text):
            raise InvalidItem(f"mm_items[{index}] has characters no URL has", item_index=index)
        try:
            url = httpx.URL(text)
            self._check_url(url, index)
        except (
            httpx.InvalidURL,
            ValueError,
        ):  # a wrong international name shows only when the host is asked for
            raise InvalidItem(f"mm_items[{index}] is not a valid URL", item_index=index) from None
        return url

    def _check_url(self, url: "httpx.URL", index: int) -> None:
        if url.scheme not in DEFAULT_PORTS or not url.host:
            raise ItemRefused(f"mm_items[{index}]: only http and https URLs are fetched", item_index=index)
        if url.userinfo:
            raise ItemRefused(f"mm_items[{index}]: a URL must not carry a user name", item_index=index)
        listed = self._config.allowed_media_domains
        host, port = url.host.lower().rstrip("."), url.port or DEFAULT_PORTS[url.scheme]
        if listed and host not in listed and f"{host}:{port}" not in listed:
            raise ItemRefused(
                f"mm_items[{index}]: the media host is not in --allowed-media-domains", item_index=index
            )
        usual = port in DEFAULT_PORTS.values() or f"{host}:{port}" in listed
        if not usual and not self._config.allow_private_media:
            raise ItemRefused(f"mm_items[{index}]: only ports 80 and 443 are fetched from", item_index=index)

    async def _follow(self, url: "httpx.URL", index: int, hold: FetchHold) -> bytearray:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(url, index, hold)
            if isinstance(answer, bytearray):
                return answer
            target = self._parse(str(url.join(answer)), index)
            if url.scheme == "https" and target.scheme == "http":
                raise ItemRefused(f"mm_items[{index}]: redirected from https to http", item_index=index)
            url = target
        raise ItemUnavailable(
            f"mm_items[{index}]: the media host redirected more than {MAX_REDIRECTS} times", item_index=index
        )

    async def _addresses(self, url: "httpx.URL", index: int) -> list[Address]:
        """Resolved once; the whole answer is refused if one address is."""
        port = url.port or DEFAULT_PORTS[url.scheme]
        try:
            found = await self._resolver.addresses(url.raw_host.decode("ascii").strip("[]"), port)
        except (OSError, UnicodeError):
            raise ItemUnavailable(
                f"mm_items[{index}]: the media host's name does not resolve", item_index=index
            ) from None
        if not all(may_connect(one, allow_private=self._config.allow_private_media) for one in found):
            raise ItemRefused(
                f"mm_items[{index}]: the media host has an address that is not public", item_index=index
            )
        return found

    async def _get(self, url: "httpx.URL", index: int, hold: FetchHold) -> bytearray | str:
        """The body of a 200, or the Location of a redirect. Tries the checked addresses in order."""
        import httpx

        for address in await self._addresses(url, index):
            try:
                return await self._get_from(address, url, index, hold)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.TimeoutException:
                raise ItemHostTimeout(
                    f"mm_items[{index}]: the media host is too slow", item_index=index
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError):
                raise ItemHostFailed(
                    f"mm_items[{index}]: the media host's answer broke off or is not HTTP", item_index=index
                ) from None
        raise ItemHostFailed(f"mm_items[{index}]: the media host cannot be reached", item_index=index)

    async def _get_from(
        self, address: Address, url: "httpx.URL", index: int, hold: FetchHold
    ) -> bytearray | str:
        request = self._http().build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.raw_host.decode("ascii").strip("[]")},
        )
        response = await self._http().send(request, stream=True)
        try:
            if response.has_redirect_location:
                return response.headers["location"]
            _check_status(response.status_code, index)
            return await self._read(response, index, hold)
        finally:
            await response.aclose()

    async def _read(self, response: "httpx.Response", index: int, hold: FetchHold) -> bytearray:
        """The decoded body, counted after decoding."""
        decoder = _Decoder(response.headers.get("content-encoding", "identity").strip().lower(), index)
        limit_bytes = self._config.max_item_bytes
        content = bytearray()
        async for chunk in response.aiter_raw():
            for piece in decoder.pieces(chunk):
                hold.add(len(piece))
                content += piece
                if len(content) > limit_bytes:
                    raise ItemTooLarge(
                        f"mm_items[{index}] is larger than {limit_bytes} bytes", item_index=index
                    )
        decoder.finish()
        if not content:
            raise InvalidItem(f"mm_items[{index}]: the media host sent an empty body", item_index=index)
        return content

    def _http(self) -> "httpx.AsyncClient":
        if self._client is None:
            import httpx

            # No keep-alive: a pooled connection is found by address alone, and its certificate was checked
            # for another name. No environment: a proxy would resolve the name again.
            self._client = httpx.AsyncClient(
                trust_env=False,
                follow_redirects=False,
                headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
                timeout=httpx.Timeout(
                    self._config.media_total_timeout_s, connect=self._config.media_connect_timeout_s
                ),
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        return self._client


class _Decoder:
    """Content-Encoding of an answer, undone in pieces of bounded size (a bomb stops at the limit)."""

    PIECE_BYTES: Final = 1 << 20

    def __init__(self, encoding: str, index: int) -> None:
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ItemUnavailable(
                f"mm_items[{index}]: the media host's Content-Encoding is not identity", item_index=index
            )
        self._index = index
        # 32: gzip or zlib, by its header
        self._inflater = None if encoding in ("", "identity") else zlib.decompressobj(32 + zlib.MAX_WBITS)

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """What chunk adds to the decoded body, at most PIECE_BYTES at a time."""
        if self._inflater is None:
            yield chunk
            return
        while chunk and not self._inflater.eof:
            try:
                yield self._inflater.decompress(chunk, self.PIECE_BYTES)
            except zlib.error:
                raise self._broken() from None
            chunk = self._inflater.unconsumed_tail

    def finish(self) -> None:
        """ItemHostFailed if the encoded stream broke off."""
        if self._inflater is not None and not self._inflater.eof:
            raise self._broken()

    def _broken(self) -> ItemHostFailed:
        return ItemHostFailed(
            f"mm_items[{self._index}]: the media host's compressed answer is broken", item_index=self._index
        )


def _check_status(status: int, index: int) -> None:
    if status == 200:
        return
    text = f"mm_items[{index}]: the media host answered {status}"
    if status >= 500 or status in RETRYABLE_STATUSES:
        raise ItemHostFailed(text, item_index=index)
    raise ItemUnavailable(text, item_index=index)
