"""A small daemon in a process of its own, for the tests of the client's side."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.client import Session, connect
from tests.bench.attach_process import AttachServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AttachServer]:
    """A daemon with an empty segment of 8 MiB."""
    with AttachServer(str(tmp_path / "attach.sock")) as server:
        yield server


@pytest.fixture
def session(server: AttachServer) -> Iterator[Session]:
    """A session with it."""
    with connect(server.path) as session:
        yield session
