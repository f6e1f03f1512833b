"""app.room: the smallest of the runs reported lately stands for the next one."""

from app.room import WINDOW, ExpectedRun
from shm.layout import PAGE_BYTES


def test_the_smallest_run_counts_as_long_as_it_is_recent() -> None:
    expected = ExpectedRun()
    assert expected.nbytes == PAGE_BYTES
    for run_bytes in (80_000, 40_000, 90_000):
        expected.learn(run_bytes)
    assert expected.nbytes == 40_000
    for _ in range(WINDOW):
        expected.learn(70_000)
    assert expected.nbytes == 70_000


def test_refusals_wear_the_estimate_out() -> None:
    expected = ExpectedRun()
    for _ in range(WINDOW):
        expected.learn(10**9)
    for _ in range(WINDOW):
        assert expected.nbytes == 10**9
        expected.doubt()
    assert expected.nbytes == PAGE_BYTES
    expected.doubt()
