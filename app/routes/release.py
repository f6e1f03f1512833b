"""POST /release: whoever holds a handle that no session has attached may end its lease."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.body import read_body
from app.errors import NotFound
from app.schema import parse_release
from app.services import Services

MAX_BODY_BYTES: Final = 64 * 1024


async def post_release(request: Request) -> Response:
    """End the lease of a handle that no session has attached. 404 when there is none (any more), 409 when a
    session has it."""
    services: Services = request.app.state.services
    body = await read_body(request.receive, request.headers, services.config, MAX_BODY_BYTES)
    if not services.engine.release(parse_release(body).wanted_nonce()):
        raise NotFound("the nonce names no unattached handle")
    return Response(b'{"released":true}', media_type="application/json")


ROUTES = [Route("/release", post_release, methods=["POST"])]
