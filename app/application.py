"""The ASGI application: routes, and the one place where an error becomes a response.

It has no lifespan of its own: `app.server` opens the sockets first and starts the engine after that, so that
/livez answers while workers load.
"""

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.edge import Edge
from app.errors import EncodeFault, RequestError
from app.problem import error_for_status, problem_response
from app.routes import encode, health, load, release
from app.services import Services


def create_application(services: Services) -> Edge:
    """The application for one daemon."""
    router = Starlette(
        routes=[*encode.ROUTES, *release.ROUTES, *health.ROUTES, *load.ROUTES],
        exception_handlers={
            RequestError: _request_error,
            HTTPException: _router_error,
            Exception: _bug,
        },
    )
    router.router.redirect_slashes = False
    router.state.services = services
    return Edge(router, log_requests=services.config.log_requests)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _problem(request, error)


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _problem(request, error_for_status(error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, error: Exception) -> Response:
    """Whatever nobody expected. Starlette re-raises it after this answer, so Hypercorn logs it."""
    logging.getLogger("encoderd").error("unexpected error on %s", request.url.path[:128])
    return _problem(request, EncodeFault("the daemon made a mistake; it is in its log"))


def _problem(request: Request, error: RequestError) -> Response:
    note = request.scope["note"]
    return problem_response(error, note.request_id, note.req_id)
