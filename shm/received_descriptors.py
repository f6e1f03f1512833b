"""Descriptors that came beside a datagram of the attach socket, until somebody owns them."""

import os
from collections import deque
from types import TracebackType
from typing import Self

from shm.errors import SessionClosed


class ReceivedDescriptors:
    """Descriptors that came with a datagram, taken one after the other; `with` closes what nobody took."""

    def __init__(self, descriptors: list[int]) -> None:
        self._waiting = deque(descriptors)

    def take(self) -> int:
        """The next descriptor, the caller's from now on. SessionClosed if the daemon sent too few."""
        if not self._waiting:
            raise SessionClosed("a datagram without the descriptors that belong to it")
        return self._waiting.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._waiting:
            os.close(self._waiting.popleft())
