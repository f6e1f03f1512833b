"""The client's end of a session's submission ring, on which it tells the daemon that leases have ended.

Each Session has one; views call it when they are released, and the garbage collector when it finds them.
`shm.encode_ring` sends its encodes through it too: a ring has one producer.
"""

import os
import socket
import threading
from collections import deque

from shm import _core
from shm.errors import SessionClosed
from shm.layout import SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT, SessionDescriptor, SessionKind
from shm.region import Region


class SubmissionRing:
    """Owns the client's end of the ring, its two mapped regions, the bell, and the session's socket.

    connection is only held open: while any lease may be alive, the daemon must not see a hang-up.

    end() may be called from any thread and from the garbage collector in the middle of anything, so it never
    waits for the lock: whoever holds it sends what others have queued.
    """

    def __init__(self, client: Region, control: Region, bell: int, connection: socket.socket) -> None:
        self._client = client
        self._control = control
        self._bell = bell
        self._connection = connection
        self._ring = _core.Producer(
            client.memory, SESSION_SIDE_OFFSET, control.memory, SESSION_SIDE_OFFSET, SESSION_SLOT_COUNT, bell
        )
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._ended: deque[int] = deque()
        self._closed = False

    def begin(self, lease: int) -> None:
        """Count a lease that the daemon gave."""
        self._live.add(lease)

    def end(self, lease: int) -> None:
        """Say that this lease has ended: now, or with a later call here if the ring has no room."""
        self._live.discard(lease)
        self._ended.append(lease)
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the ring has room."""
        # Looks again after giving the lock back: what was queued meanwhile found the lock taken.
        while self._ended and self._lock.acquire(blocking=False):
            try:
                if self._closed or not self._publish_all():
                    return
            finally:
                self._lock.release()

    def send(self, descriptor: SessionDescriptor) -> bool:
        """Publish one, after what is queued; False if the ring is full. SessionClosed."""
        with self._lock:
            if self._closed:
                raise SessionClosed("this session is closed")
            sent = self._publish_all() and self._ring.try_publish(descriptor.pack())
        if self._ended:  # the garbage collector found the lock taken
            self.flush()
        return sent

    def live(self) -> int:
        """Leases that have not ended."""
        return len(self._live)

    def waiting(self) -> int:
        """Ended leases that the ring had no room for yet."""
        return len(self._ended)

    def close(self) -> None:
        """Close the socket, which ends every lease, and give everything back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connection.close()
            self._ring.close()  # before the mappings that it looks at
            self._client.close()
            self._control.close()
            os.close(self._bell)

    def _publish_all(self) -> bool:
        while self._ended:
            lease = self._ended.popleft()
            if not self._ring.try_publish(SessionDescriptor(SessionKind.RELEASE, lease).pack()):
                self._ended.appendleft(lease)
                return False
        return True
