"""How fast requests are done, measured while there are any: what a Retry-After is computed from."""

import math
import time
from collections.abc import Callable
from typing import Final

TIME_CONSTANT_S: Final = 10.0
UNKNOWN_S: Final = 1.0


class CompletionRate:
    """Completions per second of busy time, the last ten seconds weighing most. `app.admission` has one.

    Both the count and the time fade alike, so the quotient is right from the first completion on.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._since_ns = 0
        self._count = 0.0
        self._busy_s = 0.0

    def begin(self) -> None:
        """Work comes after a time without any, which is not counted."""
        self._since_ns = self._clock_ns()

    def completed(self) -> None:
        """One request is done."""
        now_ns = self._clock_ns()
        step_s = (now_ns - self._since_ns) / 1e9
        kept = math.exp(-step_s / TIME_CONSTANT_S)
        self._count = self._count * kept + 1.0
        self._busy_s = self._busy_s * kept + step_s
        self._since_ns = now_ns

    def per_second(self) -> float:
        """0 before the first completion. While nothing is completed it falls."""
        step_s = (self._clock_ns() - self._since_ns) / 1e9
        kept = math.exp(-step_s / TIME_CONSTANT_S)
        busy_s = self._busy_s * kept + step_s
        return self._count * kept / busy_s if self._count and busy_s else 0.0

    def seconds_for(self, count: int) -> float:
        """How long so many requests take; a second where nothing is known."""
        rate = self.per_second()
        return count / rate if rate else UNKNOWN_S
