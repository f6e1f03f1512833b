"""The command line: `encoderd serve | demo | make-checkpoint | doctor`. Called by `app.__main__`.

Options become one typed ServeConfig here and nowhere else. A wrong one ends with status 78 and one line.
"""

import argparse
import os
import re
import subprocess
import sys
from typing import Any, Final, NoReturn

import msgspec

from app import logs
from app.config import (
    BATCH_PATCHES_ON_CPU,
    BATCH_PATCHES_ON_CUDA,
    EXIT_CONFIG,
    ServeConfig,
    check,
    default_attach_socket,
)
from app.errors import ConfigError
from app.hub import resolve_checkpoint
from app.notify import take_environment
from shm.errors import RegionUnavailable
from shm.messages import MediaOptions

_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class _Parser(argparse.ArgumentParser):
    """argparse with our exit status: a wrong option is a configuration error, not worth a restart."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_CONFIG, f"{self.prog}: {message}\n")


def run_command(arguments: list[str]) -> int:
    """Run one command; its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        match parsed.command:
            case "serve":
                return _serve(parsed)
            case "demo":
                from app import demo

                return demo.run()
            case "make-checkpoint":
                return _make_checkpoint(parsed)
            case _:
                from app import doctor

                return doctor.run(_serve_config(parsed, parsed.checkpoint or ""), as_json=parsed.json)
    except (ConfigError, RegionUnavailable) as error:
        print(f"encoderd: {error}", file=sys.stderr)
        return EXIT_CONFIG


def _serve(parsed: argparse.Namespace) -> int:
    logs.set_up(parsed.log_level)
    systemd = take_environment(os.environ, os.getpid())
    check(_serve_config(parsed, parsed.checkpoint))
    checkpoint = parsed.checkpoint
    if parsed.tower != "stub":
        checkpoint = resolve_checkpoint(
            checkpoint, parsed.revision, parsed.download_dir, with_code=parsed.trust_remote_code
        )
    from app import server

    server.run(_serve_config(parsed, checkpoint), systemd)
    return 0


def _make_checkpoint(parsed: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "gpu_workers.checkpoints", parsed.family, parsed.directory]
    command += ["--size", parsed.size, "--seed", str(parsed.seed)]
    return subprocess.run(command, check=False).returncode


def parse_size(text: str) -> int:
    """256MiB, 1GiB, 512M, 64MB or a plain number -> bytes. Only MB, GB ... with a B and no i are decimal."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 256MiB, 1GiB or a number of bytes")
    number, letter, unit = match.groups()
    base = 1000 if unit.lower() == "b" and letter else 1024
    power: int = _POWERS[letter.lower()]
    return int(number) * int(base**power)


def parse_media_options(text: str) -> MediaOptions:
    """JSON by modality, with or without SGLang's outer "vision_config"."""
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.convert(said.get("vision_config", said), MediaOptions)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"is not what it should be: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="encoderd", description="Encoder server for multimodal language models.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    serve = commands.add_parser("serve", help="serve a checkpoint", allow_abbrev=False)
    serve.add_argument("checkpoint", help="a directory, or a hub id such as Qwen/Qwen2.5-VL-7B-Instruct")
    _add_serve_options(serve)
    commands.add_parser("demo", help="one picture end to end on a checkpoint made on the spot")
    make = commands.add_parser("make-checkpoint", help="write a small checkpoint with random weights")
    make.add_argument("family", help="a model_type, such as qwen3_vl or qwen2_5_omni")
    make.add_argument("directory")
    make.add_argument("--size", choices=("tiny", "bench"), default="tiny")
    make.add_argument("--seed", type=int, default=0)
    doctor = commands.add_parser("doctor", help="check this machine before serving", allow_abbrev=False)
    doctor.add_argument("checkpoint", nargs="?", help="also check that this directory can be served")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    _add_serve_options(doctor)
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    defaults = ServeConfig(checkpoint="")
    _add_address_options(parser, defaults)
    _add_worker_options(parser, defaults)
    _add_memory_options(parser, defaults)
    _add_limit_options(parser, defaults)
    _add_media_options(parser, defaults)
    log = parser.add_argument_group("log")
    log.add_argument("--log-level", choices=logs.LEVELS, default=defaults.log_level)
    log.add_argument("--log-requests", action="store_true", help="one line per request, without media")


def _add_address_options(parser: argparse.ArgumentParser, defaults: ServeConfig) -> None:
    group = parser.add_argument_group("address")
    group.add_argument("--host", default=defaults.host)
    group.add_argument("--port", type=int, default=defaults.port, help="0: a free one")
    group.add_argument("--uds", default=defaults.uds, metavar="PATH", help="also serve on a Unix socket")
    group.add_argument(
        "--insecure", action="store_true", help="allow --host to be an address that others can reach"
    )


def _add_worker_options(parser: argparse.ArgumentParser, defaults: ServeConfig) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument("--workers", "--dp-size", type=int, default=defaults.workers, metavar="N")
    group.add_argument(
        "--tp-size", type=int, default=defaults.tp_size, metavar="N", help="devices per worker"
    )
    group.add_argument(
        "--tp-mode",
        choices=("weights", "data"),
        default=defaults.tp_mode,
        help="share the tower's weights over a worker's devices, or the items of each batch",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default=defaults.device)
    group.add_argument("--base-gpu-id", type=int, default=defaults.base_gpu_id, metavar="N")
    group.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default=defaults.dtype)
    group.add_argument(
        "--tower", choices=("auto", "stub"), default=defaults.tower, help="stub: a test tower without torch"
    )
    group.add_argument("--max-batch-size", type=int, default=defaults.max_batch_items, metavar="ITEMS")
    group.add_argument(
        "--max-batch-patches",
        type=int,
        default=defaults.max_batch_patches,
        metavar="N",
        help=f"default: {BATCH_PATCHES_ON_CPU} on the processor, {BATCH_PATCHES_ON_CUDA} on CUDA",
    )
    group.add_argument(
        "--max-batch-wait-us",
        type=int,
        default=defaults.max_batch_wait_us,
        metavar="US",
        help="how long an idle device waits for more items (default: it starts at once)",
    )
    group.add_argument("--preprocess-threads", type=int, default=defaults.preprocess_threads, metavar="N")
    group.add_argument(
        "--preprocess-device",
        choices=("auto", "cpu", "device"),
        default=defaults.preprocess_device,
        help="where decoded pictures are resized and normalised: device is that of the tower; "
        "auto is the same for the Qwen families on CUDA, else cpu",
    )
    group.add_argument("--revision", default="", help="of a hub id")
    group.add_argument("--download-dir", default="", metavar="DIR", help="where hub ids are kept")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run the model's code that the checkpoint brings"
    )


def _add_memory_options(parser: argparse.ArgumentParser, defaults: ServeConfig) -> None:
    group = parser.add_argument_group("shared memory")
    group.add_argument("--segment-size", type=parse_size, default=defaults.segment_bytes, metavar="1GiB")
    group.add_argument("--arena-size", type=parse_size, default=defaults.arena_bytes, metavar="512MiB")
    group.add_argument("--shm-backing", choices=("auto", "posix", "memfd"), default=defaults.shm_backing)
    group.add_argument("--attach-socket", default="", metavar="PATH", help="where readers attach")
    group.add_argument(
        "--attach-allow-uid",
        type=int,
        action="append",
        metavar="UID",
        help="who may attach (repeatable; default: own uid and root)",
    )


def _add_limit_options(parser: argparse.ArgumentParser, defaults: ServeConfig) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--max-queued-requests", type=int, default=defaults.max_queued_requests, metavar="N")
    group.add_argument(
        "--max-queued-bytes",
        type=parse_size,
        default=defaults.max_queued_bytes,
        metavar="512MiB",
        help="of media of all requests under way",
    )
    group.add_argument("--max-body-size", type=parse_size, default=defaults.max_body_bytes, metavar="96MiB")
    group.add_argument("--max-pixels", type=int, default=defaults.max_pixels, metavar="N")
    group.add_argument("--request-timeout", type=float, default=defaults.request_timeout_s, metavar="S")
    group.add_argument("--stall-timeout", type=float, default=defaults.stall_timeout_s, metavar="S")
    group.add_argument(
        "--stuck-share",
        type=float,
        default=defaults.stuck_share,
        metavar="SHARE",
        help="of the stall time-out, after which what a stuck worker has is tried on another one too",
    )
    group.add_argument(
        "--lease-timeout",
        type=float,
        default=defaults.lease_timeout_s,
        metavar="S",
        help="how long a handle waits for a session to attach it",
    )
    group.add_argument("--shutdown-timeout", type=float, default=defaults.shutdown_timeout_s, metavar="S")
    group.add_argument("--shutdown-delay", type=float, default=defaults.shutdown_delay_s, metavar="S")


def _add_media_options(parser: argparse.ArgumentParser, defaults: ServeConfig) -> None:
    group = parser.add_argument_group("media")
    group.add_argument(
        "--allow-private-media", action="store_true", help="fetch from private addresses and any port too"
    )
    group.add_argument(
        "--allowed-media-domains", nargs="+", default=[], metavar="HOST[:PORT]", help="fetch from these only"
    )
    group.add_argument("--allowed-local-media-path", default="", metavar="DIR")
    group.add_argument(
        "--media-url-max-file-size-mb", type=int, default=defaults.max_item_bytes >> 20, metavar="MIB"
    )
    group.add_argument("--rgba-background", choices=("white", "black", "drop"), default="white")
    group.add_argument(
        "--mm-process-config",
        type=parse_media_options,
        default=defaults.media_options,
        metavar="JSON",
        help='processor options by modality: {"video": {"fps": 1, "max_frames": 64}, ...}',
    )


def _serve_config(parsed: argparse.Namespace, checkpoint: str) -> ServeConfig:
    return ServeConfig(
        checkpoint=checkpoint,
        host=parsed.host,
        port=parsed.port,
        uds=parsed.uds,
        insecure=parsed.insecure,
        workers=parsed.workers,
        tp_size=parsed.tp_size,
        tp_mode=parsed.tp_mode,
        device=parsed.device,
        base_gpu_id=parsed.base_gpu_id,
        dtype=parsed.dtype,
        tower=parsed.tower,
        max_batch_items=parsed.max_batch_size,
        max_batch_patches=parsed.max_batch_patches,
        max_batch_wait_us=parsed.max_batch_wait_us,
        preprocess_threads=parsed.preprocess_threads,
        preprocess_device=parsed.preprocess_device,
        max_pixels=parsed.max_pixels,
        rgba_background=parsed.rgba_background,
        media_options=parsed.mm_process_config,
        trust_remote_code=parsed.trust_remote_code,
        segment_bytes=parsed.segment_size,
        arena_bytes=parsed.arena_size,
        shm_backing=parsed.shm_backing,
        attach_socket=parsed.attach_socket or default_attach_socket(),
        attach_allow_uids=tuple(parsed.attach_allow_uid or (os.getuid(), 0)),
        max_queued_requests=parsed.max_queued_requests,
        max_queued_bytes=parsed.max_queued_bytes,
        max_body_bytes=parsed.max_body_size,
        max_item_bytes=parsed.media_url_max_file_size_mb << 20,
        allow_private_media=parsed.allow_private_media,
        allowed_media_domains=tuple(domain.lower() for domain in parsed.allowed_media_domains),
        allowed_local_media_path=parsed.allowed_local_media_path,
        stall_timeout_s=parsed.stall_timeout,
        stuck_share=parsed.stuck_share,
        request_timeout_s=parsed.request_timeout,
        lease_timeout_s=parsed.lease_timeout,
        shutdown_timeout_s=parsed.shutdown_timeout,
        shutdown_delay_s=parsed.shutdown_delay,
        log_level=parsed.log_level,
        log_requests=parsed.log_requests,
    )
