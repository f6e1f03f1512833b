"""The listening end of the attach socket: made at its path, or inherited from systemd.

Called by `app.engine`; `app.sessions` accepts on it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.config import ServeConfig, prepare_socket_directory
from app.errors import ConfigError

BACKLOG = 128
MODE = 0o660  # the directory and SO_PEERCRED decide, the mode is one more fence


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
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        _bind(listener, path)
        listener.listen(BACKLOG)
        made = os.lstat(path)
        try:
            yield listener
        finally:
            _remove(path, made)


def _inherited(fd: int) -> socket.socket:
    listener = socket.socket(fileno=fd)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise ConfigError('the inherited descriptor "attach" is not a Unix SOCK_SEQPACKET socket')
    listener.setblocking(False)
    return listener


def _bind(listener: socket.socket, path: str) -> None:
    # The mode of the unbound socket becomes the file's: it is never more open than this, not for a moment.
    os.fchmod(listener.fileno(), MODE)
    try:
        listener.bind(path)
        os.chmod(path, MODE)  # what the umask took away
    except OSError as error:
        raise ConfigError(f"--attach-socket {path}: {error.strerror}") from None


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens behind, left by a daemon that was killed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"--attach-socket {path}: something that is no socket is there")
        if _somebody_listens(path):
            raise ConfigError(f"--attach-socket {path}: another daemon listens there")
        os.unlink(path)


def _somebody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) != errno.ECONNREFUSED


def _remove(path: str, made: os.stat_result) -> None:
    """Remove the file, unless somebody has put another one in its place."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), made):
            Path(path).unlink()
