"""systemd: readiness and watchdog messages out, listening sockets in. Both do nothing elsewhere."""

import logging
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from app.errors import ConfigError

FIRST_INHERITED_FD: Final = 3

log = logging.getLogger("encoderd")


class Notifier:
    """Talks to the NOTIFY_SOCKET of this process, if there is one. Context manager."""

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._socket.connect("\0" + address[1:] if address.startswith("@") else address)

    @property
    def connected(self) -> bool:
        """Whether somebody listens."""
        return self._socket is not None

    def ready(self) -> bool:
        """READY=1: the unit counts as started. False: say it again."""
        return self._send("READY=1\nSTATUS=ready")

    def stopping(self, seconds: float) -> None:
        """STOPPING=1: the drain has begun; all is over in so many seconds, whatever TimeoutStopSec= is."""
        self._send(f"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def status(self, text: str) -> None:
        """One line for systemctl status."""
        self._send(f"STATUS={text}")

    def watchdog(self) -> None:
        """WATCHDOG=1: the event loop turns and looks after the workers."""
        self._send("WATCHDOG=1")

    def extend_start(self, seconds: float) -> None:
        """Ask for more start time while loading makes progress."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, message: str) -> bool:
        """Whether it was said, or nobody listens. systemd is not waited for: its queue may be full, or it may
        be starting anew."""
        if self._socket is None:
            return True
        try:
            self._socket.send(message.encode())
        except OSError as error:
            log.warning("systemd does not hear us: %s", error.strerror)
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()


@dataclass(frozen=True, slots=True)
class Systemd:
    """What the environment of this process says; read once, at the entry, and removed from it."""

    notify_socket: str
    watchdog_s: float  # 0: none
    http_sockets: tuple[socket.socket, ...]
    attach_socket: socket.socket | None


def take_environment(
    environment: MutableMapping[str, str], own_pid: int, first_fd: int = FIRST_INHERITED_FD
) -> Systemd:
    """NOTIFY_SOCKET, WATCHDOG_USEC and LISTEN_FDS, taken out so that children do not see them.

    Stream sockets serve HTTP, one sequential-packet socket is the attach socket. ConfigError for anything
    else, or for a descriptor that is not a listening socket.
    """
    notify_socket = environment.pop("NOTIFY_SOCKET", "")
    watchdog_usec = environment.pop("WATCHDOG_USEC", "0")
    watchdog_pid = environment.pop("WATCHDOG_PID", str(own_pid))
    count = environment.pop("LISTEN_FDS", "0")
    listen_pid = environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    streams: list[socket.socket] = []
    attach: socket.socket | None = None
    if listen_pid == str(own_pid):
        for descriptor in range(first_fd, first_fd + int(count)):
            inherited = _inherited_socket(descriptor)
            if inherited.type == socket.SOCK_STREAM:
                streams.append(inherited)
            elif inherited.type == socket.SOCK_SEQPACKET and attach is None:
                attach = inherited
            else:
                raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is of a type that is not served")
    watchdog_s = int(watchdog_usec) / 1e6 if watchdog_pid == str(own_pid) else 0.0
    return Systemd(notify_socket, watchdog_s, tuple(streams), attach)


def _inherited_socket(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        inherited = socket.socket(fileno=descriptor)
        listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is not a socket") from None
    if not listening:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} does not listen")
    return inherited
