"""app.rate: completions per second of busy time."""

import pytest

from app.rate import UNKNOWN_S, CompletionRate


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def complete(rate: CompletionRate, clock: Clock, count: int, every_s: float) -> None:
    for _ in range(count):
        clock.pass_s(every_s)
        rate.completed()


def test_a_steady_rate_is_told_from_the_first_completion_on() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    rate.begin()
    for count in (1, 5, 500):
        complete(rate, clock, count, every_s=0.25)
        assert rate.per_second() == pytest.approx(4)
        assert rate.seconds_for(8) == pytest.approx(2)


def test_nothing_is_known_before_the_first_completion() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    rate.begin()
    clock.pass_s(3)
    assert rate.per_second() == 0
    assert rate.seconds_for(100) == UNKNOWN_S


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    rate.begin()
    complete(rate, clock, 50, every_s=0.5)
    clock.pass_s(3600)
    rate.begin()
    assert rate.per_second() == pytest.approx(2)


def test_a_new_pace_takes_over_and_a_standstill_shows() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    rate.begin()
    complete(rate, clock, 100, every_s=0.1)
    complete(rate, clock, 100, every_s=1.0)
    assert rate.per_second() == pytest.approx(1, rel=0.01)
    clock.pass_s(20)
    assert rate.per_second() < 0.5
