"""What the daemon is told, typed, once. Built by `app.cli`, read by everyone in app, changed by no one."""

import ipaddress
import itertools
import os
import stat
from pathlib import Path
from typing import Literal

import msgspec

from app.errors import ConfigError
from shm.messages import EXIT_CONFIG as EXIT_CONFIG  # of the daemon as of its workers
from shm.messages import MediaOptions

MEBIBYTE = 1 << 20
# On a processor a larger batch only leaves its caches: in tests.bench.encode 16,384 took 1.09 times the
# hand-written script's processor time for a picture, 4,096 takes 1.01 times, and 200 MB less.
BATCH_PATCHES_ON_CPU = 4096
BATCH_PATCHES_ON_CUDA = 16384
TP_SIZE_MAX = 16  # devices of one host that a tower can be worth


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`encoderd serve`. Names end in their unit; durations are seconds, sizes bytes.

    checkpoint is a directory by the time the engine sees it (app.cli resolves hub ids), and host, port and
    uds are what was really bound (app.server replaces port 0 and what LISTEN_FDS gave).
    """

    checkpoint: str
    # where HTTP is served; uds is a path, empty for none; port 0 picks one
    host: str = "127.0.0.1"
    port: int = 30300
    uds: str = ""
    insecure: bool = False
    # workers
    workers: int = 1
    tp_size: int = 1  # processes of each worker, and devices
    tp_mode: Literal["weights", "data"] = "weights"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    base_gpu_id: int = 0
    dtype: str = "auto"
    tower: Literal["auto", "stub"] = "auto"
    max_batch_items: int = 32
    max_batch_patches: int | None = None  # None: as the device likes it (`app.launch`)
    max_batch_wait_us: int = 0
    preprocess_threads: int = 2
    preprocess_device: Literal["auto", "cpu", "device"] = "auto"
    torch_threads: int = 1
    max_pixels: int = 33_554_432
    max_aspect_ratio: int = 200
    rgba_background: Literal["white", "black", "drop"] = "white"
    media_options: MediaOptions = MediaOptions()
    trust_remote_code: bool = False
    # shared memory
    segment_bytes: int = 1024 * MEBIBYTE
    arena_bytes: int = 512 * MEBIBYTE
    shm_backing: Literal["auto", "posix", "memfd"] = "auto"
    attach_socket: str = ""
    attach_fd: int = -1  # a listening SOCK_SEQPACKET from systemd; then attach_socket is its path
    attach_allow_uids: tuple[int, ...] = ()
    # limits of a request
    max_queued_requests: int = 256
    max_queued_bytes: int = 512 * MEBIBYTE
    max_body_bytes: int = 96 * MEBIBYTE
    max_item_bytes: int = 64 * MEBIBYTE
    max_items: int = 1024
    allow_private_media: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str = ""
    # time-outs, in the order that check() wants
    heartbeat_s: float = 1.0
    stall_timeout_s: float = 30.0
    stuck_share: float = 0.5  # of stall_timeout_s: then a worker's tickets are tried elsewhere too
    request_timeout_s: float = 180.0
    shutdown_timeout_s: float = 30.0
    shutdown_delay_s: float = 0.0
    lease_timeout_s: float = 60.0
    header_timeout_s: float = 5.0
    body_idle_timeout_s: float = 10.0
    body_total_timeout_s: float = 60.0
    media_connect_timeout_s: float = 2.0
    media_total_timeout_s: float = 5.0
    # log
    log_level: str = "info"
    log_requests: bool = False


def check(config: ServeConfig) -> None:
    """ConfigError for what contradicts itself; the message names both options and both values."""
    _check_timeout_order(config)
    _check_sizes(config)
    if not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is not a loopback address and there are no API keys yet: "
            "give --insecure to serve it to anyone who can reach it"
        )


def _check_timeout_order(config: ServeConfig) -> None:
    ordered = [
        ("heartbeat", config.heartbeat_s),
        ("--stall-timeout", config.stall_timeout_s),
        ("--request-timeout", config.request_timeout_s),
    ]
    for (shorter, shorter_s), (longer, longer_s) in itertools.pairwise(ordered):
        if shorter_s >= longer_s:
            raise ConfigError(f"{shorter} ({shorter_s:g} s) must be shorter than {longer} ({longer_s:g} s)")
    if not 0 < config.stuck_share <= 1:
        raise ConfigError(f"--stuck-share {config.stuck_share:g} must be above 0 and at most 1")
    if config.body_idle_timeout_s > config.body_total_timeout_s:
        raise ConfigError(
            f"body idle limit ({config.body_idle_timeout_s:g} s) must not be longer than "
            f"the body's total limit ({config.body_total_timeout_s:g} s)"
        )


def _check_sizes(config: ServeConfig) -> None:
    _check_minimums(config)
    if not 1 <= config.tp_size <= TP_SIZE_MAX:
        raise ConfigError(f"--tp-size {config.tp_size} must be from 1 to {TP_SIZE_MAX}")
    if config.tp_size > 1 and config.tower == "stub" and config.tp_mode == "weights":
        raise ConfigError("--tower stub has no weights to share: with --tp-size give --tp-mode data")
    if config.arena_bytes < config.max_body_bytes:
        raise ConfigError(
            f"--arena-size ({config.arena_bytes} bytes) must hold --max-body-size "
            f"({config.max_body_bytes} bytes)"
        )


def _check_minimums(config: ServeConfig) -> None:
    minimums = [
        ("--workers", config.workers, 1),
        ("--max-batch-size", config.max_batch_items, 1),
        ("--preprocess-threads", config.preprocess_threads, 1),
        ("--max-queued-requests", config.max_queued_requests, 1),
        ("--max-queued-bytes", config.max_queued_bytes, 1),
        ("--segment-size", config.segment_bytes, MEBIBYTE),
    ]
    if config.max_batch_patches is not None:
        minimums.append(("--max-batch-patches", config.max_batch_patches, 1))
    for option, value, minimum in minimums:
        if value < minimum:
            raise ConfigError(f"{option} {value} must be at least {minimum}")


def need_bytes(config: ServeConfig) -> int:
    """Shared memory at most: the arena, a segment for each place, and one of a dead worker that readers still
    hold while its place has a new one."""
    return config.arena_bytes + (config.workers + 1) * config.segment_bytes


def is_loopback(host: str) -> bool:
    """Whether host can be reached from this machine only. Names are not resolved: only localhost is known."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_attach_socket() -> str:
    """/run/encoderd/attach.sock where that directory is writable, else below the user's runtime directory."""
    system = Path("/run/encoderd")
    if system.is_dir() and os.access(system, os.W_OK):
        return str(system / "attach.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return str(Path(runtime) / "encoderd" / "attach.sock")
    return f"/tmp/encoderd-{os.getuid()}/attach.sock"


def prepare_socket_directory(path: str) -> None:
    """Make path's directory, 0700, if it is missing; ConfigError if someone else owns it."""
    directory = Path(path).parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError("the attach socket's directory is not a directory")
    foreign = status.st_uid not in (0, os.getuid())
    open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if foreign or open_to_all:
        raise ConfigError("the attach socket's directory belongs to another user or is writable by all")
