"""POST /encode."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.encode import encode


async def post_encode(request: Request) -> Response:
    """Media in, a handle to their embeddings out."""
    answer = await encode(request.app.state.services, request, request.scope["note"])
    return Response(msgspec.json.encode(answer), media_type="application/json")


ROUTES = [Route("/encode", post_encode, methods=["POST"])]
