"""Rows that this process maps are Hugging Face's own rows for the same file.

The rule. One picture alone in float32: every bit is equal. In a batch, and in bfloat16, sums may be split
otherwise, so bits may differ; then the distance to the float64 result must not pass the distance that
Hugging Face's own results in that dtype have (the worse of: the picture alone, all pictures in one call).
Distance: the largest absolute difference over a picture's rows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shm.client import connect
from shm.messages import Handle
from tests.e2e.client import Answer
from tests.e2e.conftest import FAMILIES, SMALL_MEMORY
from tests.e2e.daemon import REPOSITORY, Daemon

Rows = NDArray[np.floating]


@dataclass(frozen=True)
class Reference:
    """Hugging Face's rows of one family."""

    rows: dict[str, Rows]
    family: str

    def alone(self, dtype: str, picture: int) -> Rows:
        return self.rows[f"{self.family}/{dtype}/alone/{picture}"]

    def own_error(self, dtype: str, picture: int) -> float:
        """How far Hugging Face's results in this dtype are from its float64 result."""
        ways = [self.rows[f"{self.family}/{dtype}/{way}/{picture}"] for way in ("alone", "together")]
        return max(self.error(rows, picture) for rows in ways)

    def error(self, rows: Rows, picture: int) -> float:
        """The largest absolute difference to float64."""
        return float(np.abs(rows.astype(np.float64) - self.alone("float64", picture)).max())


@dataclass(frozen=True)
class Served:
    """One family: its reference and a daemon for each dtype."""

    reference: Reference
    daemons: dict[str, Daemon]


@pytest.fixture(scope="module")
def references(
    checkpoints: dict[str, Path], pictures: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Rows]:
    out = tmp_path_factory.mktemp("references") / "rows.npz"
    arguments = [str(out), *map(str, checkpoints.values()), "--", *map(str, pictures)]
    subprocess.run(
        [sys.executable, "-m", "tests.e2e.hugging_face", *arguments],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    with np.load(out, allow_pickle=False) as archive:
        return dict(archive)


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], references: dict[str, Rows]
) -> Iterator[Served]:
    """Both daemons load at the same time."""
    family = str(request.param)
    starting = [
        Daemon(str(checkpoints[family]), "--dtype", dtype, *SMALL_MEMORY, workers=1)
        for dtype in ("float32", "bfloat16")
    ]
    try:
        with starting[0] as exact, starting[1] as half:
            yield Served(Reference(references, family), {"float32": exact, "bfloat16": half})
    finally:
        for daemon in starting:
            daemon.discard()


def mapped_rows(daemon: Daemon, answer: Answer) -> list[torch.Tensor]:
    """Each item's rows, mapped in this process and then copied so that the lease can end."""
    handle: Handle = answer.handle
    with connect(daemon.attach_socket) as session, session.attach(handle) as view:
        tensor = view.torch()
        assert tensor.shape == (handle.rows, handle.dim)
        parts = [tensor[item.row_start : item.row_start + item.row_count] for item in view.metadata.items]
        assert sum(part.shape[0] for part in parts) == handle.rows
        return [part.clone() for part in parts]


def test_one_picture_alone_in_float32_is_bit_equal(served: Served, pictures: list[Path]) -> None:
    daemon = served.daemons["float32"]
    for index, path in enumerate(pictures):
        [rows] = mapped_rows(daemon, daemon.http.encode(path.read_bytes()))
        assert rows.dtype is torch.float32
        reference = torch.from_numpy(served.reference.alone("float32", index))
        assert torch.equal(rows, reference), (path.name, float((rows - reference).abs().max()))


def test_pictures_in_one_batch_are_within_hugging_faces_own_error(
    served: Served, pictures: list[Path]
) -> None:
    daemon = served.daemons["float32"]
    check_within_own_error(served, daemon, "float32", [path.read_bytes() for path in pictures])


def test_bfloat16_is_within_hugging_faces_own_error(served: Served, pictures: list[Path]) -> None:
    daemon = served.daemons["bfloat16"]
    files = [path.read_bytes() for path in pictures]
    check_within_own_error(served, daemon, "bfloat16", files)
    for index, data in enumerate(files):
        [rows] = mapped_rows(daemon, daemon.http.encode(data))
        assert rows.dtype is torch.bfloat16
        error = served.reference.error(rows.float().numpy(), index)
        assert error <= served.reference.own_error("bfloat16", index)


def check_within_own_error(served: Served, daemon: Daemon, dtype: str, files: list[bytes]) -> None:
    answer = daemon.http.encode(list(files))
    parts = mapped_rows(daemon, answer)
    assert len(parts) == len(files)
    for index, rows in enumerate(parts):
        error = served.reference.error(rows.float().numpy(), index)
        assert error <= served.reference.own_error(dtype, index), (dtype, index, error)


def test_the_answer_states_what_is_mapped(served: Served, pictures: list[Path]) -> None:
    daemon = served.daemons["float32"]
    answer = daemon.http.encode([path.read_bytes() for path in pictures], req_id="stated")
    stated, handle = answer.json, answer.handle
    rows = [served.reference.alone("float32", index).shape[0] for index in range(len(pictures))]
    dim = served.reference.alone("float32", 0).shape[1]
    assert (stated["rows"], stated["dim"], stated["dtype"]) == (sum(rows), dim, "float32")
    assert (handle.rows, handle.dim, handle.dtype) == (sum(rows), dim, "float32")
    assert stated["embedding_len"] == sum(rows)
    assert stated["embedding_dim"] == dim
    assert stated["embedding_size"] == handle.nbytes == sum(rows) * dim * 4
    assert stated["req_id"] == "stated"
    assert stated["modality"].lower() == "image"
    merged = [t * h * w // 4 for t, h, w in stated["grid_thw"]]
    assert merged == rows
    assert daemon.http.release(handle).status == 200
