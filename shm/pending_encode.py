"""An encode that was sent over a session, before anybody waits for its answer. Session.submit makes it."""

from collections.abc import Callable

from shm.encode_ring import Call, EncodeRing
from shm.layout import SessionCompletion
from shm.view import View


class PendingEncode:
    """Take its result, once, or cancel it. When it is garbage before that, it is cancelled with the session's
    next encode.

    view_of(answer): the view under the lease that the answer brought.
    """

    def __init__(self, ring: EncodeRing, call: Call, view_of: Callable[[SessionCompletion], View]) -> None:
        self._ring = ring
        self._call: Call | None = call
        self._view_of = view_of

    def result(self) -> View:
        """Wait for the answer; the rows, as Session.encode returns them. Raises what that raises.

        ValueError the second time, and after cancel().
        """
        call, self._call = self._call, None
        if call is None:
            raise ValueError("this encode's result was taken already, or it was cancelled")
        return self._view_of(self._ring.finish(call))

    def cancel(self) -> None:
        """Have the work dropped, or its lease ended. After result(), and the second time, nothing happens."""
        call, self._call = self._call, None
        if call is not None:
            self._ring.abandon(call)

    def __del__(self) -> None:
        if self._call is not None:
            self._ring.forget(self._call)
