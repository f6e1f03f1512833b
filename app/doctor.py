"""`encoderd doctor`: whether `encoderd serve` would start here, and with what. Called by `app.cli`.

Each check is a function from the configuration to one Finding; nothing is changed and nothing is started.
"""

import platform
import resource
import sys
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from app.config import EXIT_CONFIG, MEBIBYTE, ServeConfig, check, need_bytes
from app.errors import ConfigError
from shm.region import Backing, choose_backing
from shm.room import memory_room, posix_room

OLDEST_PYTHON: Final = (3, 11)


class Verdict(StrEnum):
    """warning: it would serve, with less. failed: it would not start."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    verdict: Verdict
    text: str


def run(config: ServeConfig, *, as_json: bool) -> int:
    """Print the report; 0, or 78 if something would keep the daemon from starting."""
    findings = examine(config)
    failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    if as_json:
        print(msgspec.json.encode({"ok": not failed, "checks": findings}).decode())
    else:
        for finding in findings:
            print(f"{finding.verdict:8}{finding.name:14}{finding.text}")
    return EXIT_CONFIG if failed else 0


def examine(config: ServeConfig) -> list[Finding]:
    """Every check, in the order of the report."""
    findings = [
        _python(),
        _options(config),
        _backing(config),
        _dev_shm(),
        _memlock(config),
        _cuda(config),
    ]
    return [*findings, _checkpoint(Path(config.checkpoint))] if config.checkpoint else findings


def _python() -> Finding:
    enough = sys.version_info >= OLDEST_PYTHON
    return Finding("python", Verdict.OK if enough else Verdict.FAILED, platform.python_version())


def _options(config: ServeConfig) -> Finding:
    try:
        check(config)
    except ConfigError as error:
        return Finding("options", Verdict.FAILED, str(error))
    return Finding("options", Verdict.OK, "limits and time-outs are in order")


def _backing(config: ServeConfig) -> Finding:
    need = need_bytes(config)
    backing = choose_backing(config.shm_backing, need)
    room = posix_room() if backing is Backing.POSIX else memory_room()
    text = (
        f"{backing}: {need // MEBIBYTE} MiB wanted, {room.free_bytes // MEBIBYTE} MiB there "
        f"({room.limit}); fix: --segment-size, --arena-size or --workers"
    )
    if room.free_bytes < need:
        return Finding("shared memory", Verdict.FAILED, text)
    return Finding("shared memory", Verdict.OK, text.partition("; fix")[0])


def _dev_shm() -> Finding:
    try:
        room = posix_room()
    except OSError:
        return Finding("/dev/shm", Verdict.WARNING, "is not there; segments are memfds")
    return Finding("/dev/shm", Verdict.OK, f"{room.free_bytes // MEBIBYTE} MiB ({room.limit})")


def _memlock(config: ServeConfig) -> Finding:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft_bytes == resource.RLIM_INFINITY:
        return Finding("memlock", Verdict.OK, "unlimited")
    wanted = config.workers * config.segment_bytes
    text = f"{soft_bytes // 1024} KiB; pinned segments want {wanted // 1024} KiB: LimitMEMLOCK=infinity"
    enough = soft_bytes >= wanted or not _cuda_devices()
    return Finding("memlock", Verdict.OK if enough else Verdict.WARNING, text)


def _cuda_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _cuda(config: ServeConfig) -> Finding:
    count = _cuda_devices()
    wanted = config.base_gpu_id + config.workers * config.tp_size
    if config.device == "cuda" and count < wanted:
        return Finding("cuda", Verdict.FAILED, f"{wanted} devices wanted, {count} in /dev/nvidia*")
    if not count:
        return Finding("cuda", Verdict.WARNING, "no /dev/nvidia*; workers run on the CPU")
    return Finding("cuda", Verdict.OK, f"{count} devices")


def _checkpoint(directory: Path) -> Finding:
    if not directory.is_dir():
        return Finding("checkpoint", Verdict.WARNING, "is no directory: it would be asked of the hub")
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict)
    except OSError as error:
        return Finding("checkpoint", Verdict.FAILED, f"config.json: {error.strerror}")
    except msgspec.DecodeError:
        return Finding("checkpoint", Verdict.FAILED, "config.json is not valid JSON")
    if not list(directory.glob("*.safetensors")):
        return Finding("checkpoint", Verdict.FAILED, "has no *.safetensors")
    return Finding("checkpoint", Verdict.OK, f"model_type {config.get('model_type', 'missing')}")
