"""The units, the user and the directory as systemd reads them, without starting anything."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

UNITS = Path(__file__).parents[2] / "systemd"
INSTALLED_COMMAND = "/opt/encoderd/bin/encoderd"
EXPOSURE_LIMIT = "20"  # tenths: 2.0 of 10

pytestmark = needs.program("systemd-analyze", package="systemd")


@pytest.fixture
def installed_units(tmp_path: Path) -> list[Path]:
    """Copies of the units whose command exists on this machine."""
    copies = []
    for unit in (UNITS / "encoderd.service", UNITS / "encoderd.socket"):
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace(INSTALLED_COMMAND, sys.executable))
        copies.append(copy)
    return copies


def test_verify_has_nothing_to_say(installed_units: list[Path]) -> None:
    # The exit status is 0 even for an unknown key: only the output tells.
    verify = subprocess.run(
        ["systemd-analyze", "verify", *installed_units],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (verify.stdout, verify.returncode) == ("", 0)


def test_verify_would_report_an_unknown_key(installed_units: list[Path]) -> None:
    service = installed_units[0]
    service.write_text(service.read_text().replace("[Service]", "[Service]\nWatchdogSecs=30"))
    verify = subprocess.run(["systemd-analyze", "verify", service], capture_output=True, text=True)
    assert "WatchdogSecs" in verify.stderr


def test_exposure_is_at_most_two() -> None:
    security = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_LIMIT}",
         UNITS / "encoderd.service"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert security.returncode == 0, security.stdout


@pytest.fixture
def empty_root(tmp_path: Path) -> Path:
    """A root directory without users, for the tools that fill /etc/passwd and /run."""
    (tmp_path / "etc").mkdir()
    return tmp_path


@needs.program("systemd-sysusers", package="systemd")
def test_sysusers_makes_the_user_and_the_clients_group(empty_root: Path) -> None:
    _quietly(["systemd-sysusers", f"--root={empty_root}", UNITS / "encoderd.sysusers"])
    user = _entry(empty_root / "etc/passwd", "encoderd")
    assert user[5:] == ["/var/lib/encoderd", "/usr/sbin/nologin"]
    assert _entry(empty_root / "etc/group", "encoderd")[2] == user[3]
    assert _entry(empty_root / "etc/group", "encoderd-clients")[3] == ""


@needs.program("systemd-tmpfiles", package="systemd")
@needs.root()
def test_tmpfiles_opens_the_socket_directory_to_clients_only(empty_root: Path) -> None:
    _quietly(["systemd-sysusers", f"--root={empty_root}", UNITS / "encoderd.sysusers"])
    _quietly(["systemd-tmpfiles", f"--root={empty_root}", "--create", UNITS / "encoderd.tmpfiles"])
    status = (empty_root / "run/encoderd").stat()
    assert stat.S_IMODE(status.st_mode) == 0o750
    assert str(status.st_uid) == _entry(empty_root / "etc/passwd", "encoderd")[2]
    assert str(status.st_gid) == _entry(empty_root / "etc/group", "encoderd-clients")[2]


def _quietly(command: list[str | Path]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _entry(database: Path, name: str) -> list[str]:
    entries = (line.split(":") for line in database.read_text().splitlines())
    return next(entry for entry in entries if entry[0] == name)
