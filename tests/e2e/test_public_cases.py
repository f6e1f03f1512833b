"""The public case set: single requests by its own runner, scenarios by tests.e2e.scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shm.client import connect
from tests.e2e.conftest import STUB
from tests.e2e.daemon import REPOSITORY, Daemon
from tests.e2e.load import Load
from tests.e2e.raw_session import wait_all_free
from tests.e2e.scenario import Player
from tests.e2e.stub_items import check_rows, expected_rows, stub_item

# Scenarios of what this daemon serves so far: pictures, with the processor settings of the checkpoint.
SCENARIOS = (
    "sc_hash_shape",
    "sc_hash_exif",
    "sc_hash_reencode",
    "sc_user_hash_conflict",
    "sc_user_hash_count_1",
    "sc_user_hash_count_3",
    "sc_order_8",
    "sc_order_slow_first",
    "sc_dup_items",
    "sc_batch_vs_single",
    "sc_bad_isolated",
    "sc_bad_in_list",
    "sc_same_reqid_at_once",
    "sc_same_reqid_retry",
    "sc_reqid_reuse",
    "sc_cancel",
    "sc_fail_then_ok",
    "sc_overload",
    "sc_part_twice",
)


@pytest.fixture(scope="module")
def manifest(cases_directory: Path) -> dict[str, dict[str, Any]]:
    """Every public case by its id."""
    text = (cases_directory / "cases" / "public" / "manifest.json").read_text()
    return {case["id"]: case for case in json.loads(text)["cases"]}


@pytest.fixture(scope="module")
def fixture_url(cases_directory: Path) -> Iterator[str]:
    """The set's own loopback server, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(cases_directory / "fixture_server.py")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["image", "api", "source"])
def test_every_single_request_case_passes(
    qwen: Daemon, cases_directory: Path, media_root: Path, tmp_path: Path, kind: str
) -> None:
    run_cases(cases_directory, qwen, "qwen2_vl", kind, media_root, tmp_path)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_every_single_request_case_passes_where_one_model_has_all_modalities(
    omni: Daemon, cases_directory: Path, media_root: Path, tmp_path: Path, kind: str
) -> None:
    run_cases(cases_directory, omni, "qwen2_5_omni", kind, media_root, tmp_path)


def run_cases(
    cases_directory: Path, daemon: Daemon, family: str, kind: str, media_root: Path, tmp_path: Path
) -> None:
    """The set's own runner, on every case of a kind that is one request."""
    arguments = [daemon.base_url, "--kinds", kind, "--media-root", str(media_root), "--family", family]
    done = subprocess.run(
        [sys.executable, str(cases_directory / "run_cases.py"), *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(qwen: Daemon, manifest: dict[str, dict[str, Any]], fixture_url: str, name: str) -> None:
    scenario = manifest[name]["scenario"]
    player = Player(qwen, {"FIXTURE": fixture_url})
    player.play(scenario["steps"])
    player.judge(scenario["assert"])
    wait_all_free(qwen.attach_socket)


def test_transfer_bf16_rows_are_read_as_the_case_records(
    cases_directory: Path, manifest: dict[str, dict[str, Any]]
) -> None:
    """The view's own tensor maker on the case's bytes: bfloat16 is a bit pattern, never a float16."""
    from shm.layout import Dtype
    from shm.torch_view import as_tensor

    facts = manifest["tr_bf16"]["expect"]["facts"]
    data = (cases_directory / "cases" / "public" / "transfer" / "tr_bf16.bin").read_bytes()
    rows, dim = facts["shape"]
    tensor = as_tensor(memoryview(data), rows, dim, Dtype.BFLOAT16)
    assert tensor.dtype is torch.bfloat16
    assert tensor.flatten()[:4].tolist() == facts["first4_as_float32"]
    assert float(tensor.double().sum()) == facts["sum_float64"]


def test_transfer_a_reader_that_exits_takes_nothing_from_the_next(stub: Daemon) -> None:
    """tr_resource_tracker, tr_two_readers: nothing is unlinked, because nothing has a name."""
    script = (
        "import sys, msgspec; from shm.client import connect; from shm.messages import Handle\n"
        "with connect(sys.argv[1]) as s, s.attach(msgspec.json.decode(sys.argv[2], type=Handle)) as v:\n"
        "    v.numpy().sum()\n"
    )
    for _ in range(3):
        handle = stub.http.encode(stub_item()).handle
        arguments = [stub.attach_socket, msgspec.json.encode(handle).decode()]
        subprocess.run([sys.executable, "-c", script, *arguments], cwd=REPOSITORY, check=True)
    item = stub_item()
    with connect(stub.attach_socket) as session:
        check_rows(session, stub.http.encode(item).handle, item)
    wait_all_free(stub.attach_socket)


def test_transfer_a_consumer_that_dies_before_attaching_costs_a_lease_time(hasty_stub: Daemon) -> None:
    """tr_consumer_dies."""
    for _ in range(3):
        assert hasty_stub.http.encode(stub_item()).status == 200
    wait_all_free(hasty_stub.attach_socket)


def test_transfer_kill_9_with_twenty_unclaimed_results_leaves_nothing() -> None:
    """tr_kill9_leak."""
    with Daemon(".", *STUB) as daemon:
        for _ in range(20):
            assert daemon.http.encode(stub_item()).status == 200
        daemon.kill()
        daemon.check_nothing_left()
        with Daemon(".", *STUB, directory=daemon.directory) as successor:
            assert successor.http.encode(stub_item()).status == 200
            successor.stop()
        daemon.discard()


def test_transfer_a_burst_into_small_memory_is_200_or_503_and_recovers() -> None:
    """tr_shm_small_docker, on the memfd backing that a small /dev/shm makes the daemon choose."""
    small = ("--segment-size", "32MiB", "--arena-size", "100MiB", "--shm-backing", "memfd")
    with Daemon(".", "--tower", "stub", *small) as daemon, connect(daemon.attach_socket) as session:
        with Load(daemon.http, threads=40) as load:
            for _ in range(40):
                load.post(stub_item(rows=4096))  # 4 MiB each
            answers = [outcome.answer for outcome in load.rest()]
        assert {answer.status for answer in answers if answer} == {200, 503}
        for answer in answers:
            assert answer is not None
            if answer.status == 200:
                assert daemon.http.release(answer.handle).status == 200
            else:
                answer.check_problem(503)
        for _ in range(10):
            item = stub_item(rows=4096)
            with session.attach(daemon.http.encode(item).handle) as view:
                assert np.array_equal(view.numpy(), expected_rows(item))
        assert daemon.http.get("/readyz").status == 200
