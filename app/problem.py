"""Errors as responses: RFC 9457 problem+json that SGLang's client can read too.

RFC 9457 wants a number in `status`, SGLang's client knows the string "error" there. The string wins: RFC 9457
section 3.1 tells its readers to ignore a member of the wrong type and to take the status from HTTP, while
SGLang's would break. The number stands in `status_code`.
"""

import math

import msgspec
from starlette.responses import Response

from app.errors import CAUSES, MethodNotAllowed, NotFound, RequestError, cause_of


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body. type is a URN, instance the request's id, message what SGLang's client shows."""

    type: str
    title: str
    status: str
    status_code: int
    detail: str
    message: str
    instance: str
    code: str
    retryable: bool
    req_id: str
    item_index: int | None = None


def problem_response(error: RequestError, request_id: str, req_id: str) -> Response:
    """The response for this cause. 429 and 503 say when to come again."""
    cause = cause_of(error)
    body = Problem(
        type=f"urn:encoderd:error:{cause.code}",
        title=cause.title,
        status="error",
        status_code=cause.status,
        detail=error.message,
        message=error.message,
        instance=request_id,
        code=cause.code,
        retryable=cause.retryable,
        req_id=req_id,
        item_index=error.item_index,
    )
    headers = {}
    if cause.status in (429, 503):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s or 1.0))
    return Response(
        msgspec.json.encode(body),
        status_code=cause.status,
        headers=headers,
        media_type="application/problem+json",
    )


def error_for_status(status: int) -> RequestError:
    """What the router answers on its own: 404 and 405."""
    if status == CAUSES[MethodNotAllowed].status:
        return MethodNotAllowed("this route has other methods")
    return NotFound("there is no such route")
