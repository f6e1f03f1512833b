"""A listening Unix socket at a path of its own. Used by `app.listener` and `app.attach_socket`."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from app.errors import ConfigError

MODE: Final = 0o660  # the directory and SO_PEERCRED decide, the mode is one more fence


@contextmanager
def listening_unix_socket(
    path: str, kind: socket.SocketKind, backlog: int, option: str
) -> Iterator[socket.socket]:
    """A non-blocking listening socket, in place of one that a killed daemon left; its file is removed at the
    end. option: which one named the path, for the message.

    ConfigError if somebody listens at the path, or something that is no socket lies there.
    """
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.setblocking(False)
        try:
            _remove_stale(path, kind, option)
            # The mode of the unbound socket becomes the file's: it is never more open than this.
            os.fchmod(listener.fileno(), MODE)
            listener.bind(path)
            made = os.lstat(path)
            os.chmod(path, MODE)  # what the umask took away
            listener.listen(backlog)
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be bound: {error.strerror}") from None
        try:
            yield listener
        finally:
            _remove(path, made)


def _remove_stale(path: str, kind: socket.SocketKind, option: str) -> None:
    """Remove a socket file that nobody listens behind, left by a daemon that was killed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{option} {path}: something that is no socket is there")
        if _somebody_listens(path, kind):
            raise ConfigError(f"{option} {path}: another daemon listens there")
        os.unlink(path)


def _somebody_listens(path: str, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) != errno.ECONNREFUSED


def _remove(path: str, made: os.stat_result) -> None:
    """Remove the file, unless somebody has put another one in its place."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), made):
            os.unlink(path)
