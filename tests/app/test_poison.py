"""app.poison: content that two workers died of is refused for ten minutes."""

import pytest

from app.errors import PoisonInput
from app.poison import CONTENTS_MAX, REFUSED_FOR_S, PoisonGuard
from tests.app.test_rate import Clock


def test_one_death_is_no_reason_and_a_second_one_alone_is() -> None:
    guard = PoisonGuard()
    guard.worker_died([b"a", b"b", b"a"])
    guard.check(b"a")
    guard.worker_died([b"a", b"a"])
    with pytest.raises(PoisonInput, match="2 workers"):
        guard.check(b"a")
    guard.check(b"b")
    guard.check(b"never seen")


def test_what_never_was_alone_in_a_worker_that_died_is_only_a_suspect() -> None:
    guard = PoisonGuard()
    for _ in range(5):
        guard.worker_died([b"a", b"b"])
    guard.check(b"a")
    assert guard.suspects_content(b"a")
    guard.clear(b"a")
    assert not guard.suspects_content(b"a")
    assert guard.suspects_content(b"b")


def test_after_ten_minutes_it_is_forgotten() -> None:
    clock = Clock()
    guard = PoisonGuard(clock)
    for _ in range(2):
        guard.worker_died([b"a"])
    clock.pass_s(REFUSED_FOR_S - 1)
    with pytest.raises(PoisonInput):
        guard.check(b"a")
    clock.pass_s(2)
    guard.check(b"a")
    guard.worker_died([b"b"])
    assert guard.suspects == 1


def test_the_table_is_bounded_and_keeps_the_latest() -> None:
    guard = PoisonGuard()
    for number in range(2 * CONTENTS_MAX):
        guard.worker_died([b"%d" % number])
    assert guard.suspects == CONTENTS_MAX
    guard.worker_died([b"%d" % (2 * CONTENTS_MAX - 1)])
    with pytest.raises(PoisonInput):
        guard.check(b"%d" % (2 * CONTENTS_MAX - 1))
