"""Two groups of two ranks with real towers, in both modes: one rank's numbers, also after kills."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shm.client import Session, connect
from tests.e2e.client import Answer
from tests.e2e.daemon import Daemon, command_line
from tests.e2e.load import Load, Outcome
from tests.e2e.pictures import picture_bytes
from tests.e2e.test_group import DEATH_STATUSES, kill, wait_back
from tests.gpu_workers.reference import noise, wav
from tests.gpu_workers.video_files import encode as video_file

MEMORY = ("--dtype", "float32", "--segment-size", "16MiB", "--arena-size", "96MiB")
GROUPS = ("--tp-size", "2", "--tp-mode")
# float32 sums over two halves instead of one whole, or over other neighbours, through a tiny tower's blocks
RELATIVE_ROUNDING = 1e-5
PICTURES = [
    picture_bytes(width, height, width) for width, height in ((56, 56), (112, 84), (84, 140), (196, 112))
]
VIDEOS = [bytes(video_file(range(count))) for count in (4, 12)]
SOUNDS = [bytes(wav(noise(samples))) for samples in (48_000, 20_800)]
# modality and items of each request
REQUESTS: dict[str, tuple[str, list[bytes]]] = {
    **{f"picture {number}": ("image", [picture]) for number, picture in enumerate(PICTURES)},
    "pictures": ("image", PICTURES),
    "videos": ("video", VIDEOS),
    "sounds": ("audio", SOUNDS),
}
Rows = dict[str, NDArray[np.float32]]


def rows_of(session: Session, answer: Answer) -> NDArray[np.float32]:
    assert answer.status == 200, answer.body
    with session.attach(answer.handle) as view:
        return view.numpy().copy()


def encode_all(daemon: Daemon) -> Rows:
    """Each of REQUESTS by itself."""
    with connect(daemon.attach_socket) as session:
        return {
            name: rows_of(session, daemon.http.encode(items, modality=modality))
            for name, (modality, items) in REQUESTS.items()
        }


def post_all(load: Load) -> None:
    """All of REQUESTS at once; the name of each is its req_id's first part."""
    for name, (modality, items) in REQUESTS.items():
        load.post(*items, modality=modality, req_id=f"{name}/{uuid.uuid4().hex}")


def name_of(outcome: Outcome) -> str:
    return outcome.req_id.partition("/")[0]


def process_of(daemon: Daemon, place: int, rank: int) -> int:
    """The process id, by what the process was told at its start."""
    configs = {
        pid: json.loads(command_line(pid).rstrip(b"\0").rpartition(b"\0")[2]) for pid in daemon.worker_pids()
    }
    [pid] = [pid for pid, told in configs.items() if (told["index"], told["rank"]) == (place, rank)]
    return pid


def assert_rounding(found: NDArray[np.float32], right: NDArray[np.float32], name: str) -> None:
    assert found.shape == right.shape, name
    assert np.linalg.norm(right) > 0, f"{name}: zeros are no evidence"
    assert np.linalg.norm(found - right) <= RELATIVE_ROUNDING * np.linalg.norm(right), name


@pytest.fixture(scope="module")
def one_rank(omni_checkpoint: Path) -> Rows:
    """What a worker of one process gives."""
    with Daemon(str(omni_checkpoint), *MEMORY, workers=1) as daemon:
        return encode_all(daemon)


@pytest.fixture(scope="module", params=["data", "weights"])
def mode(request: pytest.FixtureRequest) -> str:
    """--tp-mode."""
    return str(request.param)


@pytest.fixture(scope="module")
def groups(mode: str, omni_checkpoint: Path) -> Iterator[Daemon]:
    """Two places of two ranks each."""
    with Daemon(str(omni_checkpoint), *MEMORY, *GROUPS, mode) as daemon:
        yield daemon


def test_groups_give_the_numbers_of_one_rank_for_every_modality(
    groups: Daemon, mode: str, one_rank: Rows
) -> None:
    assert ("layers are shared by 2 ranks" in groups.log()) == (mode == "weights")
    assert len(groups.worker_pids()) == 4
    assert len(groups.http.workers()) == 2
    for _ in range(2):  # equals take turns: the second round goes to the other place
        for name, rows in encode_all(groups).items():
            assert_rounding(rows, one_rank[name], name)
            if mode == "data" and len(REQUESTS[name][1]) == 1:
                assert np.array_equal(rows, one_rank[name]), f"{name}: the same forward on one rank"
    with connect(groups.attach_socket) as session, Load(groups.http, len(REQUESTS)) as load:
        post_all(load)
        for outcome in load.rest():
            assert outcome.answer is not None, outcome.lost
            name = name_of(outcome)
            assert_rounding(rows_of(session, outcome.answer), one_rank[name], name)


def test_groups_whose_ranks_are_killed_in_turn_under_load_are_back_and_lose_nothing(
    groups: Daemon, one_rank: Rows
) -> None:
    """Rank 0 of one place, then, while that loads, rank 1 of the other."""
    victims = [process_of(groups, place=0, rank=0), process_of(groups, place=1, rank=1)]
    answered = 0
    with connect(groups.attach_socket) as session, Load(groups.http, len(REQUESTS)) as load:
        for victim in victims:
            post_all(load)
            post_all(load)
            kill(victim)
            for outcome in load.rest():
                assert outcome.answer is not None, f"lost: {outcome.lost!r}"
                if outcome.answer.status != 200:
                    outcome.answer.check_problem(*DEATH_STATUSES, req_id=outcome.req_id)
                    continue
                name = name_of(outcome)
                assert_rounding(rows_of(session, outcome.answer), one_rank[name], name)
                answered += 1
    assert answered
    for victim in victims:
        wait_back(groups, victim)
    for name, rows in encode_all(groups).items():
        assert_rounding(rows, one_rank[name], name)
    assert groups.http.arena_is_free()
