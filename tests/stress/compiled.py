"""Builds threads.c over the extension's pure C sources, or over a copy of them with one line changed."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).parents[2] / "shm" / "csrc"
HARNESS = Path(__file__).with_name("threads.c")
SOURCES = ("ring.c", "doorbell.c", "block.c")


def build(target: Path, flags: Sequence[str], csrc: Path = CSRC) -> Path:
    """The harness, compiled with flags over csrc's sources."""
    sources = [HARNESS, *(csrc / name for name in SOURCES)]
    command: list[str | Path] = ["gcc", "-std=c11", "-g", "-Werror", "-pthread", *flags]
    command += [f"-I{csrc}", *sources, "-o", target]
    subprocess.run(command, check=True)
    return target


def changed(folder: Path, name: str, before: str, after: str, *, function: str = "") -> Path:
    """A copy of the sources in folder, where the one `before` in file `name` became `after`.

    function: only in the body of this one, where others have the same line.
    """
    for path in CSRC.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    text = (folder / name).read_text()
    start = text.index(f"{function}(") if function else 0
    end = text.index("\n}\n", start) if function else len(text)
    assert text.count(before, start, end) == 1
    (folder / name).write_text(text[:start] + text[start:end].replace(before, after) + text[end:])
    return folder
