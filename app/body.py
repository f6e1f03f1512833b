"""A request's body, streamed under a limit of bytes and two of time. Hypercorn has neither."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from app.config import ServeConfig
from app.errors import BodyTimeout, BodyTooLarge, InvalidRequest, RequestCancelled, UnsupportedMediaType


def check_headers(headers: Headers, max_body_bytes: int) -> None:
    """What the headers alone rule out: 415 for a type that is not JSON, 413 for a length over the limit."""
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("Content-Type must be application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding must be identity")
    try:
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise InvalidRequest("Content-Length is not a number") from None
    if length > max_body_bytes:
        raise _too_large(max_body_bytes)


def announced_media_bytes(headers: Headers) -> int:
    """Upper bound of the media in a body of the announced length (base64 is four characters for three bytes);
    0 if it does not say."""
    length = headers.get("content-length", "")
    return int(length) * 3 // 4 if length.isascii() and length.isdigit() and len(length) < 16 else 0


async def read_body(receive: Receive, headers: Headers, config: ServeConfig, max_bytes: int) -> bytearray:
    """The whole body. BodyTooLarge as soon as the count passes max_bytes; BodyTimeout when no byte came for
    body_idle_timeout_s or the whole took longer than body_total_timeout_s; RequestCancelled when the client
    has gone."""
    check_headers(headers, max_bytes)
    body = bytearray()
    loop = asyncio.get_running_loop()
    give_up = loop.time() + config.body_total_timeout_s
    idle_end = loop.time() + config.body_idle_timeout_s
    try:
        async with asyncio.timeout_at(min(idle_end, give_up)) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("the client went away while sending")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return body
                idle_end = loop.time() + config.body_idle_timeout_s
                limit.reschedule(min(idle_end, give_up))
    except TimeoutError:
        if idle_end < give_up:
            text = f"no byte of the body arrived for {config.body_idle_timeout_s:g} s"
        else:
            text = f"the body did not arrive within {config.body_total_timeout_s:g} s"
        raise BodyTimeout(text) from None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")
