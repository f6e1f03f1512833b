"""GET /load: what a router asks before it chooses an encoder."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.engine import WorkerLoad
from app.services import Services


@dataclass(frozen=True, slots=True)
class Load:
    """server_load is vLLM's word: requests under way. queue_depth: those without a worker yet. Costs are rows
    of embeddings, estimated until a request's shape is known. Bytes: queued_bytes are media of all requests
    under way; arena and segments are free pages."""

    server_load: int
    max_requests: int
    queue_depth: int
    outstanding_cost: int
    queued_bytes: int
    max_queued_bytes: int
    requests_per_second: float
    arena_free_bytes: int
    segment_free_bytes: int
    workers: list[WorkerLoad]


async def get_load(request: Request) -> Response:
    """The load, now. 503 while the daemon starts."""
    services: Services = request.app.state.services
    config, admission, engine = services.config, services.admission.statistics(), services.engine
    workers = engine.loads()
    load = Load(
        server_load=admission.in_flight,
        max_requests=config.max_queued_requests,
        queue_depth=engine.queue_depth,
        outstanding_cost=sum(worker.outstanding_cost for worker in workers),
        queued_bytes=admission.queued_bytes,
        max_queued_bytes=config.max_queued_bytes,
        requests_per_second=round(admission.per_second, 3),
        arena_free_bytes=engine.arena.statistics().free_bytes,
        segment_free_bytes=sum(worker.segment_free_bytes for worker in workers),
        workers=workers,
    )
    return Response(msgspec.json.encode(load), media_type="application/json")


ROUTES = [Route("/load", get_load, methods=["GET"])]
