"""The suite in parts: every folder with tests runs once, and no failure is lost on the way."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite.parts import TESTS, folders

PASSES = "pass"
FAILS = "assert not 'what went wrong'"
BREAKS_ITS_PROCESS = "import os; os._exit(3)"


def lay(tests: Path, **bodies: str) -> None:
    """One folder with one test for each body."""
    for folder, body in bodies.items():
        (tests / folder).mkdir()
        (tests / folder / f"test_{folder}.py").write_text(f"def test_of_{folder}():\n    {body}\n")
    (tests / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")


def run(tests: Path, *options: str) -> tuple[int, str]:
    """Exit status and all that was written."""
    main = "import sys; from pathlib import Path; from tests.suite.parts import main; "
    call = f"{main} sys.exit(main(Path({str(tests)!r}), sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", call, *options], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_every_test_of_this_suite_lies_in_one_of_the_folders() -> None:
    files = list(TESTS.rglob("test_*.py"))
    assert {path.relative_to(TESTS).parts[0] for path in files} == set(folders(TESTS))
    assert all(len(path.relative_to(TESTS).parts) == 2 for path in files)


def test_all_folders_run_and_the_last_line_counts_their_tests(tmp_path: Path) -> None:
    lay(tmp_path, one=PASSES, two=PASSES, three=PASSES)
    status, output = run(tmp_path)
    assert status == 0
    assert re.fullmatch(r"3 passed in [0-9.]+s", output.splitlines()[-1])


def test_a_failure_in_one_folder_is_shown_and_fails_the_whole(tmp_path: Path) -> None:
    lay(tmp_path, good=PASSES, bad=FAILS)
    status, output = run(tmp_path)
    assert status == 1
    assert "what went wrong" in output
    assert re.fullmatch(r"1 failed, 1 passed in [0-9.]+s", output.splitlines()[-1])


def test_a_process_that_ends_without_a_summary_fails_the_whole(tmp_path: Path) -> None:
    lay(tmp_path, good=PASSES, gone=BREAKS_ITS_PROCESS)
    status, output = run(tmp_path)
    assert status == 1
    assert "gone" in output


@pytest.mark.parametrize(("chosen", "expected"), [("good", 0), ("bad", 1), ("nothing", 1)])
def test_options_choose_tests_in_every_folder(tmp_path: Path, chosen: str, expected: int) -> None:
    lay(tmp_path, good=PASSES, bad=FAILS)
    status, _ = run(tmp_path, "-k", f"test_of_{chosen}")
    assert status == expected


def test_an_interrupted_folder_is_the_last_to_start(tmp_path: Path) -> None:
    interrupts = "raise KeyboardInterrupt"
    lay(tmp_path, a=interrupts, b=interrupts, c=PASSES)
    status, output = run(tmp_path)
    assert status == 1
    assert "not started" in output
    assert "passed" not in output.splitlines()[-1]
