"""Containers are opened from memory, and reach nothing else."""

import io
from pathlib import Path

import pytest

from gpu_workers.errors import ItemError
from gpu_workers.media.container import MemoryFile, open_container, video_stream
from shm.errors import ErrorCode
from tests.gpu_workers.video_files import encode

SCRIPTS = {
    "playlist": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{path}\n#EXT-X-ENDLIST\n",
    "concatenation": "ffconcat version 1.0\nfile '{path}'\n",
    "session": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_that_names_other_files_is_no_media(tmp_path: Path, script: str) -> None:
    (tmp_path / "secret.mp4").write_bytes(encode(range(3)))
    text = SCRIPTS[script].format(path=tmp_path / "secret.mp4")
    with (
        pytest.raises(ItemError) as error,
        open_container(memoryview(text.encode()), ErrorCode.NOT_A_VIDEO),
    ):
        raise AssertionError("it was opened")
    assert error.value.code is ErrorCode.NOT_A_VIDEO


def test_a_known_beginning_is_damage_and_not_something_else() -> None:
    with (
        pytest.raises(ItemError) as error,
        open_container(memoryview(b"\0\0\0\x18ftypmp42" + bytes(40)), ErrorCode.NOT_AUDIO),
    ):
        raise AssertionError("it was opened")
    assert error.value.code is ErrorCode.DECODE_FAILED


def test_a_container_opens_from_borrowed_memory() -> None:
    with open_container(encode(range(3)), ErrorCode.NOT_A_VIDEO) as container:
        assert video_stream(container).frames == 3


def test_a_memory_file_reads_and_seeks_like_a_file() -> None:
    file = MemoryFile(memoryview(b"0123456789"))
    assert file.read(4) == b"0123"
    assert file.seek(-2, io.SEEK_END) == 8
    assert file.read(4) == b"89"
    assert file.read(4) == b""
    assert file.seek(2) == 2
    assert file.seek(3, io.SEEK_CUR) == 5
    assert file.tell() == 5
    assert file.seek(20) == 20
    assert file.read(1) == b""
    assert file.seek(-1) == 0
