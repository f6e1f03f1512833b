"""Content that kills workers is refused for a while. Called by `app.dispatch`.

Every content under way in a worker that dies is a suspect. One that was there when two workers died, the last
of which had nothing else, is poison for ten minutes; `app.quarantine` sees to it that a suspect is alone in
the end. Deaths are counted by content, not by request: a client that tries again does not get a third worker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from app.errors import PoisonInput

DEATHS_MAX: Final = 2
REFUSED_FOR_S: Final = 600.0
CONTENTS_MAX: Final = 4096


@dataclass(slots=True)
class _Suspect:
    deaths: int
    last_death_ns: int
    was_alone: bool = False  # in the worker that died last


class PoisonGuard:
    """The suspects by content digest, the longest unseen first. Bounded: the oldest is forgotten first."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def worker_died(self, digests: Iterable[bytes]) -> None:
        """A worker died while these, and nothing else, were under way in it."""
        now_ns = self._clock_ns()
        self._forget_old(now_ns)
        contents = set(digests)
        for digest in contents:
            suspect = self._suspects.setdefault(digest, _Suspect(0, now_ns))
            suspect.deaths += 1
            suspect.last_death_ns = now_ns
            suspect.was_alone = len(contents) == 1
            self._suspects.move_to_end(digest)
        while len(self._suspects) > CONTENTS_MAX:
            self._suspects.popitem(last=False)

    def check(self, digest: bytes) -> None:
        """PoisonInput while this content is refused."""
        suspect = self._suspects.get(digest)
        if suspect is None:
            return
        refused_ns = suspect.last_death_ns + int(REFUSED_FOR_S * 1e9) - self._clock_ns()
        if suspect.deaths >= DEATHS_MAX and suspect.was_alone and refused_ns > 0:
            raise PoisonInput(
                f"{suspect.deaths} workers died while they had this content; it is refused for another "
                f"{refused_ns // 10**9} s"
            )

    def suspects_content(self, digest: bytes) -> bool:
        """Whether a worker died lately while this content was under way in it."""
        return digest in self._suspects

    def clear(self, digest: bytes) -> None:
        """A worker had this content, and nothing that is not cleared too, and lives."""
        self._suspects.pop(digest, None)

    @property
    def suspects(self) -> int:
        """How many contents were under way in a worker that died lately."""
        return len(self._suspects)

    def _forget_old(self, now_ns: int) -> None:
        while self._suspects:
            digest, oldest = next(iter(self._suspects.items()))
            if now_ns - oldest.last_death_ns < REFUSED_FOR_S * 1e9:
                return
            del self._suspects[digest]
