"""app.application: every error becomes one problem, expected or not."""

from __future__ import annotations

import json

import pytest

from app.application import create_application
from app.fetch import MediaFetcher
from app.ingest import Ingest
from app.services import Services
from tests.app.serving import config, exchange, post, run, served, status_of


async def answer_of(request: bytes) -> bytes:
    """From a daemon whose engine has not started."""
    settings = config()
    async with MediaFetcher(settings) as fetcher:
        application = create_application(Services(settings, Ingest(settings, fetcher)))
        async with served(application, settings) as port:
            return await exchange(port, request)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/livez", 200), ("/readyz", 503), ("/health", 503), ("/readyz?verbose", 503), ("/health_generate", 503),
     ("/server_info", 503), ("/encode", 405), ("/encode/", 404), ("/nothing", 404)],
)  # fmt: skip
def test_probes_are_answered_before_the_engine_starts(path: str, status: int) -> None:
    assert status_of(run(answer_of(get(path)))) == status


def test_an_encode_before_the_engine_starts_is_503_with_retry_after() -> None:
    answer = run(answer_of(post("/encode", b"{}")))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == 503
    assert b"retry-after: 1" in head
    assert json.loads(body)["code"] == "no_worker_ready"


def test_a_mistake_of_ours_is_a_problem_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """services is missing on purpose: the handler stumbles as a bug would make it stumble."""

    async def main() -> bytes:
        settings = config()
        async with MediaFetcher(settings) as fetcher:
            services = Services(settings, Ingest(settings, fetcher))
            application = create_application(services)
            monkeypatch.delattr(services, "admission")
            async with served(application, settings) as port:
                return await exchange(port, get("/readyz"))

    answer = run(main())
    assert status_of(answer) == 500
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["code"] == "encode_fault"
    assert "admission" not in json.dumps(body)
