"""The extensions' own tests once more, with them built for the address and undefined sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import program

ROOT = Path(__file__).parents[2]
# The hammers of test_doorbell.py and test_block.py are about order between processes: threads.c has those.
TESTS = (
    "tests/shm/test_ring.py",
    "tests/shm/test_doorbell.py",
    "tests/shm/test_block.py",
    "tests/shm/test_base64.py",
    "tests/shm/test_module.py",
    "tests/gpu_workers/test_patchify.py",
)
NOT_HERE = "not lost and not is_never_seen_half"

pytestmark = program("gcc", package="gcc")


def library(name: str) -> str:
    """Path of a sanitizer's runtime."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of its own: the Python files, the tests, and extensions that were built for it."""
    tree = tmp_path_factory.mktemp("sanitized")
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "conftest.py")
    for folder in ("shm", "gpu_workers", "tests/shm", "tests/gpu_workers"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for name in ("setup.py", "tests/__init__.py"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=importlib -p no:cacheprovider\n")
    flags = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "CFLAGS": flags, "LDFLAGS": "-fsanitize=address,undefined"},
        check=True,
    )
    return tree


def test_the_extensions_tests_pass_under_the_address_and_undefined_sanitizers(sanitized: Path) -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that every bytes object has red zones around it
    }
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", NOT_HERE, *TESTS],
        cwd=sanitized,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("built", ["shm/_core.abi3.so", "gpu_workers/_pixels.abi3.so"])
def test_the_sanitized_tree_runs_its_own_extensions(sanitized: Path, built: str) -> None:
    symbols = (sanitized / built).read_bytes()
    assert b"__asan_report_load" in symbols
    assert b"__ubsan_handle" in symbols
