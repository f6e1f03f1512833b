"""One real daemon with a stub worker for the tests of what needs the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon

STUB_OPTIONS = ("--tower", "stub", "--segment-size", "32MiB", "--arena-size", "128MiB")


@pytest.fixture(scope="session")
def stub_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One stub worker, private media allowed."""
    checkpoint = str(tmp_path_factory.mktemp("stub"))
    with Daemon(checkpoint, *STUB_OPTIONS, "--allow-private-media", "--log-requests", workers=1) as daemon:
        yield daemon
