"""How long the event loop was held: the worst delays of a timer that should fire every five milliseconds.

Started by `app.server`, shown by /server_info. A callback that holds the loop delays the timer by as much,
less one period at most. How much of a delay was this thread's own work, its CPU clock tells; the rest was
another thread with the interpreter lock, or another process with the core.
"""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

PERIOD_S: Final = 0.005
WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """Milliseconds. lag: how late a turn of the loop was; cpu: the loop thread's own work in that time.
    recent: of the last one to two minutes; worst: since the start."""

    recent_lag_ms: float
    recent_cpu_ms: float
    worst_lag_ms: float
    worst_cpu_ms: float


@dataclass(slots=True)
class _Peak:
    lag_s: float = 0.0
    cpu_s: float = 0.0

    def raise_to(self, lag_s: float, cpu_s: float) -> None:
        self.lag_s = max(self.lag_s, lag_s)
        self.cpu_s = max(self.cpu_s, cpu_s)


class LoopMonitor:
    """Watches the running loop between enter and exit."""

    def __init__(self) -> None:
        self._worst = _Peak()
        self._this_window = _Peak()
        self._last_window = _Peak()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._window_end_s = time.monotonic() + WINDOW_S
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def statistics(self) -> LoopStatistics:
        """The peaks until now."""
        recent = _Peak(self._last_window.lag_s, self._last_window.cpu_s)
        recent.raise_to(self._this_window.lag_s, self._this_window.cpu_s)
        values = (recent.lag_s, recent.cpu_s, self._worst.lag_s, self._worst.cpu_s)
        return LoopStatistics(*(round(seconds * 1000, 3) for seconds in values))

    def _wait(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        now_s = time.monotonic()
        lag_s = max(0.0, now_s - self._due_s)
        # Work before the timer was due is in this reading too, so the delay is its upper bound.
        cpu_s = min(lag_s, time.thread_time() - self._cpu_s)
        if now_s > self._window_end_s:
            self._last_window, self._this_window = self._this_window, _Peak()
            self._window_end_s = now_s + WINDOW_S
        self._this_window.raise_to(lag_s, cpu_s)
        self._worst.raise_to(lag_s, cpu_s)
        self._wait()
