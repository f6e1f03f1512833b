"""The heartbeat: tells control that this process lives and since when its oldest step has been under way.

The heart's thread writes both words; every other thread only marks its steps (a decode, a forward, a copy).
Control replaces a worker whose oldest step is too old, so whatever could hang has to be marked.
"""

import threading
import time
from types import TracebackType
from typing import Final, Self

from shm.link import WorkerLink

_BEAT_SECONDS: Final = 0.25  # the contract asks for one beat in 0.5 s


class Heart:
    """Beats while it is entered. One per process, made by worker.run."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._started_ns: dict[Step, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="heart", daemon=True)

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def step(self) -> "Step":
        """Mark the work inside `with` as one step. Any thread."""
        return Step(self._lock, self._started_ns)

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            oldest_step_ns = min(self._started_ns.values(), default=0)
        self._link.heartbeat(oldest_step_ns)


class Step:
    """Work under way while it is entered."""

    __slots__ = ("_lock", "_started_ns")

    def __init__(self, lock: threading.Lock, started_ns: dict["Step", int]) -> None:
        self._lock = lock
        self._started_ns = started_ns

    def __enter__(self) -> None:
        with self._lock:
            self._started_ns[self] = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            del self._started_ns[self]
