"""The listening end of the attach socket: made at its path, or inherited from systemd.

Called by `app.engine`; `app.sessions` accepts on it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from app.config import ServeConfig, prepare_socket_directory
from app.errors import ConfigError
from app.unix_socket import listening_unix_socket

BACKLOG = 128


@contextmanager
def listening_attach_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """A non-blocking listening SOCK_SEQPACKET; the file is removed at the end if it was made here.

    ConfigError if another daemon listens at the path, or something that is no socket lies there.
    """
    if config.attach_fd >= 0:
        with _inherited(config.attach_fd) as listener:
            yield listener
        return
    path = config.attach_socket
    prepare_socket_directory(path)
    with listening_unix_socket(path, socket.SOCK_SEQPACKET, BACKLOG, "--attach-socket") as listener:
        yield listener


def _inherited(fd: int) -> socket.socket:
    listener = socket.socket(fileno=fd)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise ConfigError('the inherited descriptor "attach" is not a Unix SOCK_SEQPACKET socket')
    listener.setblocking(False)
    return listener
