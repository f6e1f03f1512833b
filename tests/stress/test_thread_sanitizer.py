"""ThreadSanitizer over the ring, the doorbell and the block header; and that it would see a missing order."""

import subprocess
from pathlib import Path

import pytest

from tests.needs import program
from tests.stress.compiled import build, changed

# ThreadSanitizer does not model fences (-Wno-tsan): they run as they are, and every hand-over of plain bytes
# goes through a release and an acquire that it does model. -fno-builtin: a memcpy that became instructions
# would not be watched.
FLAGS = ("-O1", "-fsanitize=thread", "-Wno-tsan", "-fno-builtin")
COUNT = {"spin": 30_000, "several": 30_000, "futex": 30_000, "eventfd": 30_000, "header": 10_000}
RACE = 66

pytestmark = program("gcc", package="gcc")


def run(harness: Path, what: str) -> subprocess.CompletedProcess[str]:
    # Without address randomisation: ThreadSanitizer of gcc 12 cannot place its shadow on every kernel.
    return subprocess.run(
        ["setarch", "-R", harness, what, str(COUNT[what])],
        env={"TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tsan") / "threads", FLAGS)


@pytest.mark.parametrize("what", COUNT)
def test_two_threads_have_no_data_race_and_lose_nothing(harness: Path, what: str) -> None:
    finished = run(harness, what)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("what", "function", "ordered"),
    [
        ("spin", "ring_try_publish", "&ring->side->tail, ring->tail, memory_order_release"),
        ("spin", "ring_try_take", "&ring->side->head, ring->head, memory_order_release"),
        ("several", "ring_try_publish_many", "&ring->side->tail, ring->tail, memory_order_release"),
        ("several", "ring_take_many", "&ring->side->head, ring->head, memory_order_release"),
        ("spin", "ring_pending", "&ring->peer->tail, memory_order_acquire"),
        ("spin", "ring_free_slots", "&ring->peer->head, memory_order_acquire"),
    ],
)
def test_a_release_or_acquire_less_is_seen(tmp_path: Path, what: str, function: str, ordered: str) -> None:
    relaxed = ordered.rpartition(" ")[0] + " memory_order_relaxed"
    csrc = changed(tmp_path, "ring.c", ordered, relaxed, function=function)
    finished = run(build(tmp_path / "threads", FLAGS, csrc), what)
    assert finished.returncode == RACE
    assert "data race" in finished.stderr
