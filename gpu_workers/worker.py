"""One worker from start to end: set up the process, map the regions, load the tower, run the threads.

    intake ──▶ backlog ──▶ prepare-0..n ──▶ backlog ──▶ device (main) ──▶ backlog ──▶ publisher

What costs less than a hand-over stays on its thread: intake prepares items that hardly need it, the device
thread delivers rows that are there when the forward returns. Elsewhere a thread `deliver` stands behind it.

Exit status: 0 finished (SIGTERM or DRAIN), 78 a configuration that can never work, 70 anything else. The root
cause is the last line on stderr; before READY it is also left in the link for control.
"""

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gpu_workers.backlog import Backlog, BatchLimits
from gpu_workers.config import parse_config
from gpu_workers.deliver import Deliverer, DeliverThread, EncodedBatch
from gpu_workers.errors import ConfigurationError
from gpu_workers.families.registry import Loaded
from gpu_workers.faults import Faults
from gpu_workers.forward import DeviceLoop
from gpu_workers.group import open_ranks
from gpu_workers.heart import Heart
from gpu_workers.intake import Intake
from gpu_workers.loading import load_working
from gpu_workers.log import configure_logging
from gpu_workers.prepare import PreparePool, Preparer
from gpu_workers.publish import Publisher
from gpu_workers.rank import run_rank
from gpu_workers.ranks import Ranks
from gpu_workers.threads import EXIT_CONFIGURATION, EXIT_SOFTWARE, run_or_exit
from shm import _core
from shm.arena import ArenaReader
from shm.layout import RegionKind, WorkerState
from shm.link import WorkerLink
from shm.messages import WorkerConfig, WorkerInfo
from shm.region import Region, attach_region
from shm.segment import SegmentWriter

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """The worker's whole life. argv: program, WorkerConfig as JSON. Returns the exit status."""
    try:
        config = parse_config(argv)
    except ConfigurationError as error:
        logging.critical("%s", error)
        return EXIT_CONFIGURATION
    _tie_to_parent(config.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; control decides for us
    configure_logging(config)
    _keep_libraries_quiet_and_offline()
    try:
        return run_rank(config) if config.rank > 0 else _run(config)
    except Exception:  # the edge of the process; the traceback ends with the root cause
        logger.critical("failed", exc_info=True)
        return EXIT_SOFTWARE


def _run(config: WorkerConfig) -> int:
    regions = _attach(config)
    link = WorkerLink(regions.link, config.completion_eventfd)
    started_ns = time.monotonic_ns()
    with Heart(link) as heart:
        try:
            faults = Faults(config.faults)
            loaded = _load(config, link, regions.segment)
            ranks = open_ranks(config, loaded.family, regions.group)
        except ConfigurationError as error:
            return _give_up(link, str(error), EXIT_CONFIGURATION)
        except Exception as error:  # loading runs foreign code; whatever it raises ends the start
            logger.debug("load failed", exc_info=True)
            return _give_up(link, f"{type(error).__name__}: {error}", EXIT_SOFTWARE)
        load_ms = (time.monotonic_ns() - started_ns) // 1_000_000
        device_loop = _start_threads(config, regions, link, loaded, ranks, heart, faults)
        gc.freeze()  # what loading left stays for good: a full collection would only stop all threads for it
        _announce(link, loaded, load_ms)
        run_or_exit(device_loop.run)
    logger.info("finished")
    return 0


class _Regions(NamedTuple):
    link: Region
    arena: Region
    segment: Region
    group: Region | None


def _tie_to_parent(parent_pid: int) -> None:
    """Die with the control plane, even if it is killed; also if that has happened already."""
    _core.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _keep_libraries_quiet_and_offline() -> None:
    """Before any model library is imported: checkpoints are directories, nothing is asked of a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def _attach(config: WorkerConfig) -> _Regions:
    return _Regions(
        attach_region(config.link_fd, RegionKind.LINK, writable=True),
        attach_region(config.arena_fd, RegionKind.ARENA, writable=False),
        attach_region(config.segment_fd, RegionKind.SEGMENT, writable=True),
        attach_region(config.group_fd, RegionKind.GROUP, writable=True) if config.world_size > 1 else None,
    )


def _load(config: WorkerConfig, link: WorkerLink, segment: Region) -> Loaded:
    """Load the tower and prove that it encodes."""
    link.set_state(WorkerState.LOADING)
    return load_working(config, segment)


def _give_up(link: WorkerLink, reason: str, status: int) -> int:
    """Leave the reason for control and as the last line of the log."""
    line = " ".join(reason.split())
    link.publish_failure(line)
    link.set_state(WorkerState.FAILED)
    logger.critical("cannot start: %s", line)
    return status


def _start_threads(
    config: WorkerConfig,
    regions: _Regions,
    link: WorkerLink,
    loaded: Loaded,
    ranks: Ranks,
    heart: Heart,
    faults: Faults,
) -> DeviceLoop:
    """All threads but the main one, whose loop is returned. From here on SIGTERM means: finish."""
    family, device = loaded
    publisher = Publisher(link, faults, on_failed=ranks.forget)
    max_wait_ns = config.max_batch_wait_us * 1000
    waits_for_others = device.is_asynchronous or ranks.answer_later
    limits = BatchLimits(
        config.max_batch_items,
        config.max_batch_patches,
        max_wait_ns,
        None if waits_for_others else _cores_beside_forward(config),
    )
    backlog = Backlog(publisher, limits, wake_intake=link.submissions.wake)
    preparer = Preparer(family, ranks, faults)
    intake = Intake(
        link,
        ArenaReader(regions.arena),
        SegmentWriter(regions.segment),
        family,
        backlog,
        publisher,
        None if ranks.answer_later else preparer,
        heart,
        faults,
    )
    signal.signal(signal.SIGTERM, lambda _signal, _frame: intake.request_finish())
    PreparePool(backlog, preparer, heart).start(_prepare_threads(config))
    intake.start()
    deliver = _deliver(Deliverer(backlog, device, heart), behind=waits_for_others)
    return DeviceLoop(backlog, family, device, deliver, heart, faults, ranks)


def _deliver(deliverer: Deliverer, *, behind: bool) -> Callable[[EncodedBatch], None]:
    """What the device thread does with a batch: behind it, on a thread, or itself."""
    if not behind:
        return deliverer.deliver
    thread = DeliverThread(deliverer)
    thread.start()
    return thread.put


def _cores_beside_forward(config: WorkerConfig) -> int:
    """Cores that a forward on the processor leaves free; at least one is used."""
    return max(1, len(os.sched_getaffinity(0)) - config.torch_threads)


def _prepare_threads(config: WorkerConfig) -> int:
    """Where items are split over ranks, most of these threads wait for another rank's."""
    return config.preprocess_threads * (config.world_size if config.tp_mode == "data" else 1)


def _announce(link: WorkerLink, loaded: Loaded, load_ms: int) -> None:
    """Tell control what this worker is. The state is READY afterwards."""
    info = loaded.family.info()
    described = WorkerInfo(
        model_type=info.model_type,
        modalities=list(info.modalities),
        dim=info.dim,
        dtype=info.dtype.label,
        device=loaded.device.name,
        tower_bytes=info.tower_bytes,
        load_ms=load_ms,
    )
    link.publish_info(described)
    link.set_state(WorkerState.READY)
    fields = msgspec.structs.asdict(described)
    logger.info("ready %s", " ".join(f"{name}={value}" for name, value in fields.items()))
