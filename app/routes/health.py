"""What probes ask: does the loop turn, may traffic come, does a real encode work."""

import asyncio
import base64
import io
import wave
import zlib
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.encode import probe
from app.errors import DeadlinePassed, ModalityNotServed, NoWorkerReady
from app.place import WorkerStatus
from app.services import Services

PROBE_TIMEOUT_S: Final = 30.0
PROBE_SIDE_PIXELS: Final = 56
PROBE_RATE_HZ: Final = 16_000
PROBE_SOUND_S: Final = 0.01


async def livez(request: Request) -> Response:
    """200 while the event loop turns. Depends on nothing."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """200 while one worker is ready and the daemon is not stopping; the others are listed.
    ?verbose: one line each instead of JSON."""
    services: Services = request.app.state.services
    state, workers = _state(services)
    if "verbose" in request.query_params:
        lines = [
            f"[{'+' if worker.state == 'ready' else '-'}]worker{worker.index} {worker.state} {worker.reason}"
            for worker in workers
        ]
        body = ("\n".join([*lines, state]) + "\n").encode()
        media_type = "text/plain"
    else:
        body = msgspec.json.encode({"status": state, "workers": workers})
        media_type = "application/json"
    status = 200 if state == "ready" else 503
    headers = {} if status == 200 else {"Retry-After": "1"}
    return Response(body, status, headers, media_type)


def _state(services: Services) -> tuple[str, list[WorkerStatus]]:
    try:
        workers = services.engine.workers()
    except NoWorkerReady:
        workers = []
    if services.admission.leaving:
        return "draining", workers
    return "ready" if services.some_worker_ready() else "starting", workers


async def health_generate(request: Request) -> Response:
    """200 after a real encode through a worker: of a small picture, or of sound if no pictures are served."""
    services: Services = request.app.state.services
    if not services.some_worker_ready():
        raise NoWorkerReady("no worker is ready")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await probe(services, *_sample(services), PROBE_TIMEOUT_S)
    except TimeoutError:
        raise DeadlinePassed(f"the probe took longer than {PROBE_TIMEOUT_S:g} s") from None
    return PlainTextResponse("ok\n")


def _sample(services: Services) -> tuple[str, str]:
    """(modality, base64) of what the checkpoint can encode."""
    try:
        services.engine.check_served("image")
    except ModalityNotServed:
        return "audio", probe_sound()
    return "image", probe_picture()


def probe_sound() -> str:
    """PROBE_SOUND_S of silence as a WAV file in base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(PROBE_RATE_HZ)
        sound.writeframes(bytes(2 * int(PROBE_RATE_HZ * PROBE_SOUND_S)))
    return base64.b64encode(file.getvalue()).decode()


def probe_picture() -> str:
    """A gray PNG in base64, PROBE_SIDE_PIXELS wide and high."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    side = PROBE_SIDE_PIXELS.to_bytes(4, "big")
    header = chunk(b"IHDR", side + side + b"\x08\x00\x00\x00\x00")
    rows = (b"\x00" + b"\x80" * PROBE_SIDE_PIXELS) * PROBE_SIDE_PIXELS
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


async def server_info(request: Request) -> Response:
    """Version, limits, workers and the engine's counters."""
    services: Services = request.app.state.services
    config = services.config
    body = {
        "version": daemon_version(),
        "limits": {
            "max_queued_requests": config.max_queued_requests,
            "max_queued_bytes": config.max_queued_bytes,
            "max_body_bytes": config.max_body_bytes,
            "max_item_bytes": config.max_item_bytes,
            "max_pixels": config.max_pixels,
            "request_timeout_s": config.request_timeout_s,
        },
        "attach_socket": config.attach_socket,
        "workers": services.engine.workers(),
        "admission": services.admission.statistics(),
        "event_loop": services.loop_monitor.statistics(),
        "engine": services.engine.statistics(),
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


def daemon_version() -> str:
    """The installed distribution's, or 0 when run from a checkout that was never installed."""
    try:
        return version("encoderd")
    except PackageNotFoundError:
        return "0"


ROUTES = [
    Route("/livez", livez, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/health", readyz, methods=["GET"]),
    Route("/health_generate", health_generate, methods=["GET"]),
    Route("/server_info", server_info, methods=["GET"]),
]
