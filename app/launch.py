"""What one worker launch needs: its regions, its configuration and its process.

Called by `app.place`. Creating the regions takes most of a second for each GiB and may run on any thread;
`spawn` must run on the main thread, because the parent-death signal follows the thread that forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from app.config import BATCH_PATCHES_ON_CPU, BATCH_PATCHES_ON_CUDA, ServeConfig
from app.ranks import RankProcess
from app.worker import LINK_SLOT_COUNT
from shm.group import create_group
from shm.link import create_link
from shm.messages import WorkerConfig
from shm.region import Backing, Region
from shm.segment import create_segment

# glibc's heap as a worker wants it, unless the environment says otherwise. By default each large temporary of
# a decode or a forward is mapped afresh, page fault by page fault, and given back: about 4 % of the processor
# time of an encode on CPU. 32 MiB is the largest threshold that glibc takes; 1 GiB of free heap is kept.
KEPT_HEAP: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(slots=True)
class LaunchRegions:
    """One launch's shared memory and the bell of its completion ring."""

    link: Region
    segment: Region
    completion_eventfd: int
    group: Region | None = None  # of a tensor-parallel group
    store_fd: int = -1  # where its ranks' collectives meet

    def close(self) -> None:
        """Give everything back."""
        self.close_link()
        self.segment.close()

    def close_link(self) -> None:
        """Give back what ends with the worker; the segment may live on with its leases."""
        self.link.close()
        os.close(self.completion_eventfd)
        if self.group is not None:
            self.group.close()
            os.close(self.store_fd)


class Launcher:
    """Everything that is the same for all launches of this boot."""

    def __init__(
        self, config: ServeConfig, boot_id: bytes, backing: Backing, arena_read_only_fd: int
    ) -> None:
        self._config = config
        self._boot_id = boot_id
        self._backing = backing
        self._arena_read_only_fd = arena_read_only_fd

    def create_regions(self, place: int, epoch: int) -> LaunchRegions:
        """A link and a segment of this epoch. RegionUnavailable; nothing is left behind then."""
        with ExitStack() as undo:
            link = create_link(LINK_SLOT_COUNT, self._boot_id, place, epoch, self._backing)
            undo.callback(link.close)
            segment = create_segment(
                self._config.segment_bytes,
                boot_id=self._boot_id, place=place, epoch=epoch, backing=self._backing,
            )  # fmt: skip
            undo.callback(segment.close)
            group = self._create_group(place, epoch)
            if group is not None:
                undo.callback(group.close)
            eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, eventfd)
            store_fd = os.memfd_create("encoderd-store", os.MFD_CLOEXEC) if group is not None else -1
            undo.pop_all()
        return LaunchRegions(link, segment, eventfd, group, store_fd)

    def _create_group(self, place: int, epoch: int) -> Region | None:
        if self._config.tp_size == 1:
            return None
        return create_group(
            self._config.tp_size, boot_id=self._boot_id, place=place, epoch=epoch, backing=self._backing
        )

    def spawn(self, regions: LaunchRegions) -> list[RankProcess]:
        """Start every rank, in a session of its own: a Ctrl-C is for us, who then drain.

        OSError; none of them is left then. The caller closes the pidfds.
        """
        started: list[RankProcess] = []
        try:
            for rank in range(self._config.tp_size):
                started.append(_spawn(self.worker_config(regions, rank)))
        except OSError:
            for process, pidfd in started:
                process.kill()
                process.wait()
                os.close(pidfd)
            raise
        return started

    def worker_config(self, regions: LaunchRegions, rank: int = 0) -> WorkerConfig:
        """What this rank of the worker of these regions is told. Rank 0 alone gets the link."""
        config = self._config
        place = regions.link.header.place
        device = _device(config, place * config.tp_size + rank)
        return WorkerConfig(
            index=place,
            epoch=regions.link.header.epoch,
            parent_pid=os.getpid(),
            checkpoint=config.checkpoint,
            tower=config.tower,
            device=device,
            dtype=config.dtype,
            link_fd=regions.link.fd if rank == 0 else -1,
            arena_fd=self._arena_read_only_fd,
            segment_fd=regions.segment.fd,
            completion_eventfd=regions.completion_eventfd if rank == 0 else -1,
            max_batch_items=config.max_batch_items,
            max_batch_patches=config.max_batch_patches or _batch_patches(device),
            max_batch_wait_us=config.max_batch_wait_us,
            preprocess_threads=config.preprocess_threads,
            preprocess_device=config.preprocess_device,
            torch_threads=config.torch_threads,
            max_pixels=config.max_pixels,
            max_aspect_ratio=config.max_aspect_ratio,
            rgba_background=config.rgba_background,
            trust_remote_code=config.trust_remote_code,
            log_level=config.log_level,
            media_options=config.media_options,
            rank=rank,
            world_size=config.tp_size,
            tp_mode=config.tp_mode,
            group_fd=regions.group.fd if regions.group is not None else -1,
            store_fd=regions.store_fd,
        )


def _spawn(config: WorkerConfig) -> RankProcess:
    argv = [sys.executable, "-m", "gpu_workers", msgspec.json.encode(config).decode()]
    named = (config.link_fd, config.arena_fd, config.segment_fd, config.completion_eventfd,
             config.group_fd, config.store_fd)  # fmt: skip
    inherited = [fd for fd in named if fd >= 0]
    process = subprocess.Popen(
        argv,
        env=KEPT_HEAP | os.environ,
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        start_new_session=True,
    )
    try:
        return RankProcess(process, os.pidfd_open(process.pid))
    except OSError:
        process.kill()
        process.wait()
        raise


def _device(config: ServeConfig, number: int) -> str:
    """One device for each rank of each place. "auto" is CUDA where its driver has made its device file."""
    cuda = config.device == "cuda" or (config.device == "auto" and Path("/dev/nvidiactl").exists())
    return f"cuda:{config.base_gpu_id + number}" if cuda else "cpu"


def _batch_patches(device: str) -> int:
    return BATCH_PATCHES_ON_CPU if device == "cpu" else BATCH_PATCHES_ON_CUDA
