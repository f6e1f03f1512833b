"""Media by local path, below one allowed directory. Used by `app.ingest`, in a thread.

The path is walked one component at a time from the directory's descriptor, no symbolic link is followed and
".." is refused, so nothing that happens to the tree meanwhile leads outside.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from app.errors import InvalidItem, ItemRefused, ItemTooLarge, ItemUnavailable

ANY_READ_BIT: Final = 0o444


class LocalMedia:
    """The allowed directory, or none."""

    def __init__(self, root: str, max_item_bytes: int) -> None:
        self._roots = tuple({Path(root), Path(root).resolve()}) if root else ()
        self._max_item_bytes = max_item_bytes

    def open(self, path: str, index: int) -> "LocalFile":
        """A regular, readable file below the root, open. ItemRefused for whatever lies outside, without
        saying whether it exists; ItemUnavailable and ItemTooLarge for what is inside."""
        root, parts = self._below_root(path, index)
        try:
            descriptor = _open_beneath(root, parts)
        except OSError:
            raise ItemUnavailable(f"mm_items[{index}]: the file cannot be read", item_index=index) from None
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > self._max_item_bytes:
                raise ItemTooLarge(
                    f"mm_items[{index}] is larger than {self._max_item_bytes} bytes", item_index=index
                )
            if not size_bytes:
                raise InvalidItem(f"mm_items[{index}] is an empty file", item_index=index)
        except BaseException:
            os.close(descriptor)
            raise
        return LocalFile(descriptor, size_bytes)

    def _below_root(self, path: str, index: int) -> tuple[Path, tuple[str, ...]]:
        for root in self._roots:
            with suppress(ValueError):
                parts = Path(path).relative_to(root).parts
                if parts and ".." not in parts and "\0" not in path:
                    return root, parts
        if not self._roots:
            raise ItemRefused(
                f"mm_items[{index}]: local paths need --allowed-local-media-path", item_index=index
            )
        raise ItemRefused(
            f"mm_items[{index}]: the path is not below --allowed-local-media-path", item_index=index
        )


class LocalFile:
    """An open file and its size when it was opened. close() once."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    def read_into(self, target: memoryview) -> int:
        """Fill target from the start; bytes read (fewer if the file shrank)."""
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


def _open_beneath(root: Path, parts: tuple[str, ...]) -> int:
    """The file at root/parts, read-only. OSError for a link, a missing part, anything that is not a regular
    file, and a file that nobody may read (root could)."""
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            deeper = os.open(
                part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
            )
            os.close(directory)
            directory = deeper
        # O_PATH first: opening a device or a FIFO would already act on it.
        found = os.open(parts[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        mode = os.fstat(found).st_mode
        if not stat.S_ISREG(mode) or not mode & ANY_READ_BIT:
            raise PermissionError
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)
