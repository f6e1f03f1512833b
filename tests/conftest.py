"""What holds for the whole suite: nothing left behind, and on request nothing skipped.

A test that stops making progress shows its stacks by pytest's own faulthandler (pyproject.toml). What a
skipped test needs is written in tests/needs.py; `.ci/run` installs all of it and passes --no-skips.
"""

import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.shared_memory import names_that_stay, shared_memory_names

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)

# Every process started by a test inherits this variable, so an orphan can be told from a stranger.
SESSION_MARK = "ENCODERD_TEST_SESSION"

# Started by multiprocessing's queues (we measure against them), ends with the interpreter.
INTERPRETER_HELPER = "multiprocessing.resource_tracker"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _fail_if_skipped(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _fail_if_skipped(report, collector.config)


def _fail_if_skipped(report: ReportT, config: pytest.Config) -> ReportT:
    """With --no-skips the reason of a skip becomes the text of a failure. Expected failures stay."""
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        where = report.longrepr
        report.longrepr = f"skipped under --no-skips: {where[2] if isinstance(where, tuple) else where}"
    return report


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No name of ours in /dev/shm and no process of ours may outlive the session."""
    names_before = shared_memory_names()
    os.environ[SESSION_MARK] = mark = secrets.token_hex(8)
    yield
    del os.environ[SESSION_MARK]
    left_names = names_that_stay(names_before)
    left_processes = _processes_marked(mark)
    assert (left_names, left_processes) == (set(), {}), "left behind in /dev/shm, or running"


def _processes_marked(mark: str) -> dict[int, str]:
    """Live processes that inherited our mark: pid to command line. A zombie has no environment any more."""
    marked = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        if f"{SESSION_MARK}={mark}".encode() in environment and INTERPRETER_HELPER not in command:
            marked[int(entry.name)] = command
    return marked
