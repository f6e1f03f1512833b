"""app.files: local media below one directory and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.errors import InvalidItem, ItemRefused, ItemTooLarge, ItemUnavailable
from app.files import LocalMedia

CONTENT = b"picture"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "media"
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "a.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    return directory


def read(root: Path, path: object) -> bytes:
    file = LocalMedia(str(root), 1000).open(str(path), 3)
    try:
        target = bytearray(file.size_bytes)
        assert file.read_into(memoryview(target)) == len(target)
        return bytes(target)
    finally:
        file.close()


def test_a_file_below_the_root_is_read(root: Path) -> None:
    assert read(root, root / "deep" / "a.png") == CONTENT


def test_a_root_that_is_a_link_serves_both_spellings(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    assert read(link, link / "deep" / "a.png") == CONTENT
    assert read(link, root / "deep" / "a.png") == CONTENT


def test_whatever_lies_outside_is_refused_whether_it_exists_or_not(root: Path) -> None:
    messages = set()
    for path in ("/etc/hostname", "/no/such/file", root / ".." / "secret", f"{root}/deep/../../secret", root):
        with pytest.raises(ItemRefused) as caught:
            read(root, path)
        messages.add(caught.value.message)
        assert caught.value.item_index == 3
    assert len(messages) == 1
    assert str(root) not in messages.pop()


def test_a_sibling_with_the_same_beginning_is_outside(root: Path) -> None:
    sibling = root.with_name("media2")
    sibling.mkdir()
    (sibling / "a").write_bytes(CONTENT)
    with pytest.raises(ItemRefused):
        read(root, sibling / "a")


def test_without_a_root_there_are_no_local_paths(root: Path) -> None:
    with pytest.raises(ItemRefused, match="--allowed-local-media-path"):
        LocalMedia("", 1000).open(str(root / "deep" / "a.png"), 0)


def test_links_lead_nowhere(root: Path, tmp_path: Path) -> None:
    (root / "file-link").symlink_to(tmp_path / "secret")
    (root / "directory-link").symlink_to(tmp_path)
    (root / "inner-link").symlink_to(root / "deep" / "a.png")
    for path in ("file-link", "directory-link/secret", "inner-link"):
        with pytest.raises(ItemUnavailable):
            read(root, root / path)


def test_only_regular_readable_files_are_opened(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "closed").write_bytes(CONTENT)
    (root / "closed").chmod(0)
    for path in ("fifo", "closed", "deep", "missing", "deep/a.png/b"):
        with pytest.raises(ItemUnavailable):
            read(root, root / path)
    with pytest.raises(ItemRefused):
        read(root, f"{root}/a\0b")


def test_size_limits_hold(root: Path) -> None:
    (root / "large").write_bytes(bytes(1001))
    (root / "empty").write_bytes(b"")
    with pytest.raises(ItemTooLarge, match="1000"):
        read(root, root / "large")
    with pytest.raises(InvalidItem, match="empty"):
        read(root, root / "empty")


def test_a_refused_file_leaves_no_descriptor(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("deep", "missing", "deep/a.png"):
        try:
            read(root, root / path)
        except ItemUnavailable:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrank_gives_what_is_left(root: Path) -> None:
    path = root / "deep" / "a.png"
    file = LocalMedia(str(root), 1000).open(str(path), 0)
    path.write_bytes(b"pic")
    assert file.read_into(memoryview(bytearray(file.size_bytes))) == 3
    file.close()
