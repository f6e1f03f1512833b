"""app.config: what cannot be served is refused at start, with both values named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.config import check, is_loopback, prepare_socket_directory
from app.errors import ConfigError
from tests.app.serving import config


def test_the_defaults_are_in_order() -> None:
    check(config())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"stall_timeout_s": 200.0},
            "--stall-timeout (200 s) must be shorter than --request-timeout (180 s)",
        ),
        ({"stall_timeout_s": 0.5}, "heartbeat (1 s) must be shorter than --stall-timeout (0.5 s)"),
        ({"request_timeout_s": 30.0}, "--stall-timeout (30 s) must be shorter than --request-timeout (30 s)"),
        ({"body_idle_timeout_s": 100.0}, "(100 s)"),
        ({"workers": 0}, "--workers 0"),
        ({"max_batch_items": 0}, "--max-batch-size 0"),
        ({"max_batch_patches": 0}, "--max-batch-patches 0"),
        ({"preprocess_threads": 0}, "--preprocess-threads 0"),
        ({"segment_bytes": 4096}, "--segment-size 4096"),
        ({"tp_size": 0}, "--tp-size 0"),
        ({"tp_size": 17}, "--tp-size 17"),
        ({"tp_size": 2, "tower": "stub"}, "--tp-mode data"),
        ({"arena_bytes": 1 << 20}, "--arena-size (1048576 bytes)"),
        ({"host": "0.0.0.0"}, "--insecure"),
        ({"host": "example.com"}, "--insecure"),
    ],
)
def test_a_contradiction_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        check(config(**changes))


def test_insecure_opens_other_addresses() -> None:
    check(config(host="0.0.0.0", insecure=True))


def test_only_this_machine_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "", "10.0.0.1", "127.evil.example"))


def test_the_socket_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    prepare_socket_directory(str(tmp_path / "deep" / "attach.sock"))
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700
    (tmp_path / "deep").chmod(0o777)
    with pytest.raises(ConfigError, match="writable by all"):
        prepare_socket_directory(str(tmp_path / "deep" / "attach.sock"))
