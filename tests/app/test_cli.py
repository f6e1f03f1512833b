"""app.cli: options become a ServeConfig, and wrong ones a status of 78."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from app import cli
from app.config import EXIT_CONFIG


def parse(*options: str) -> argparse.Namespace:
    return cli._parser().parse_args(["serve", "model", *options])


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096), ("1GiB", 1 << 30), ("256MiB", 256 << 20), ("512m", 512 << 20), ("1g", 1 << 30),
        ("64MB", 64_000_000), ("2KiB", 2048), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_in_the_usual_spellings(text: str, size_bytes: int) -> None:
    assert cli.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "1 GiB x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cli.parse_size(text)


def test_dp_size_is_another_name_for_workers() -> None:
    assert parse("--dp-size", "3").workers == parse("--workers", "3").workers == 3


def test_options_arrive_in_the_configuration() -> None:
    parsed = parse(
        "--attach-allow-uid", "5", "--attach-allow-uid", "6", "--segment-size", "64MiB",
        "--media-url-max-file-size-mb", "8", "--allowed-media-domains", "A.example", "b.example:8080",
        "--attach-socket", "/run/x.sock", "--preprocess-device", "device",
    )  # fmt: skip
    config = cli._serve_config(parsed, "directory")
    assert config.attach_allow_uids == (5, 6)
    assert config.segment_bytes == 64 << 20
    assert config.max_item_bytes == 8 << 20
    assert config.allowed_media_domains == ("a.example", "b.example:8080")
    assert (config.checkpoint, config.attach_socket) == ("directory", "/run/x.sock")
    assert config.preprocess_device == "device"


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "x", "--no-such-option"), "--no-such-option"),
        (("serve", "x", "--tower", "stub", "--host", "0.0.0.0"), "--insecure"),
        (("serve", "x", "--tower", "stub", "--stall-timeout", "500"), "180 s"),
        (("serve", "/no/such/directory"), "not a directory"),
    ],
)
def test_a_wrong_configuration_ends_with_78_and_one_line(arguments: tuple[str, ...], named: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode == EXIT_CONFIG
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_the_control_plane_loads_no_model_library_no_numpy_and_no_http_client() -> None:
    script = (
        "import sys, app.server, app.cli\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'httpx', 'gpu_workers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
