"""Items for the stub tower: bytes that say what should happen to them, each one unlike all others."""

from __future__ import annotations

import uuid

import numpy as np
from numpy.typing import NDArray

from gpu_workers.families.stub import stub_rows
from shm.client import Session
from shm.messages import Handle


def stub_item(rows: int | None = None, *, forward_ms: int | None = None, fault: str | None = None) -> bytes:
    """One unique item; the directives are the stub tower's own."""
    directives = {"rows": rows, "forward_ms": forward_ms, "fault": fault}
    words = [f"{name}={value}" for name, value in directives.items() if value is not None]
    return " ".join(["stub", *words, f"id={uuid.uuid4().hex}"]).encode()


def expected_rows(*items: bytes) -> NDArray[np.float32]:
    """What is right for these items, in order."""
    return np.concatenate([stub_rows(item) for item in items])


def check_rows(session: Session, handle: Handle, *items: bytes) -> None:
    """Map the handle's rows in this process, compare them with what is right, give the lease back."""
    with session.attach(handle) as view:
        mapped = view.numpy()
        assert mapped.dtype == np.float32
        assert np.array_equal(mapped, expected_rows(*items)), "wrong rows"
        view.check()
        del mapped
