"""One worker place: one process after another, each proved dead before the next may take its place.

The supervisor runs `Place.run` as a task for each place. What readers hold in segments of its dead workers
keeps memory; the place has at most one segment's worth of that beside the present worker's own, or it waits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from app.completions import Completions
from app.config import EXIT_CONFIG
from app.launch import Launcher, LaunchRegions
from app.outbox import Outbox
from app.segments import Block, Segments
from app.worker import Worker, WorkerCondition
from shm.errors import RegionCorrupt, RegionUnavailable
from shm.group import rank_failure
from shm.link import ControlLink
from shm.messages import WorkerInfo

DEAD_SEGMENTS_MAX = 64  # each is a mapping in control and in every reader
START_LIMIT_S = 600.0
STOP_GRACE_S = 5.0
BACK_OFF_FIRST_S = 0.1
BACK_OFF_MAX_S = 10.0
HEALTHY_AFTER_S = 60.0

logger = logging.getLogger(__name__)


class PlaceState(StrEnum):
    """Where a place without a worker stands; with one, the worker's condition is its state."""

    STARTING = "starting"  # its regions are being created
    WAITING = "waiting"  # readers hold too much in dead workers' segments
    DEAD = "dead"  # backing off before the next launch
    FAILED = "failed"  # misconfigured: not started again
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One place as the readiness routes show it. reason: why it is not ready, or why it last died."""

    index: int
    epoch: int
    state: str
    pid: int
    in_flight: int
    restarts: int
    reason: str
    info: WorkerInfo | None


class BackOff:
    """How long to wait before a launch: 0, 0.1, 0.2, 0.4 ... 10 s after deaths in a row."""

    def __init__(self) -> None:
        self._failures = 0

    def next_delay_s(self, *, was_healthy: bool) -> float:
        """After one more death. A worker that was healthy before it died starts the row anew."""
        self._failures = 1 if was_healthy else self._failures + 1
        if self._failures == 1:
            return 0.0
        return float(min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2 ** min(self._failures - 2, 10)))


class Place:
    """The life of one place. on_ready and on_lost tell the engine what became of its worker.

    dead_bytes_max: how much readers may keep of its dead workers' segments when the next one is launched.
    readers: who may read these blocks, in words.
    """

    def __init__(
        self,
        index: int,
        launcher: Launcher,
        segments: Segments,
        completions: Completions,
        dead_bytes_max: int,
        *,
        readers: Callable[[Iterable[Block]], list[str]],
        on_ready: Callable[[], None],
        on_lost: Callable[[Worker], None],
    ) -> None:
        self.index = index
        self.epoch = 1
        self.restarts = 0
        self.worker: Worker | None = None
        self._info: WorkerInfo | None = None
        self._state = PlaceState.STARTING
        self._reason = ""
        self._back_off = BackOff()
        self._stopping = asyncio.Event()
        self._memory_freed = asyncio.Event()
        self._waits_for = ""
        self._launcher = launcher
        self._segments = segments
        self._completions = completions
        self._dead_bytes_max = dead_bytes_max
        self._readers = readers
        self._on_ready = on_ready
        self._on_lost = on_lost

    async def run(self) -> None:
        """Launch, wait for the death, bury, back off, again; until stopped, or misconfigured (`failure`)."""
        while not self._stopping.is_set():
            await self._wait_for_room()
            was_healthy = await self._live_once()
            if self._state is PlaceState.FAILED:
                return
            await self._wait(self._back_off.next_delay_s(was_healthy=was_healthy))
            self.restarts += 1
        self._state = PlaceState.STOPPED

    async def stop(self) -> None:
        """No further launch; the worker may end what it has, and is killed if that takes too long."""
        self._stopping.set()
        self._memory_freed.set()
        worker = self.worker
        if worker is None:
            return
        worker.stop()
        await asyncio.wait([worker.ended], timeout=STOP_GRACE_S)
        worker.send_signal(signal.SIGKILL)

    def check(self, *, stall_ns: int, slow_ns: int) -> None:
        """The supervisor's heartbeat: flush what waits for room, condemn a worker that makes no progress."""
        if self.worker is not None and not self.worker.ended.done():
            self.worker.outbox.flush()
            self._observe(self.worker)
            self.worker.check_progress(
                stall_ns=stall_ns, slow_ns=slow_ns, start_limit_ns=int(START_LIMIT_S * 1e9)
            )

    def memory_freed(self) -> None:
        """Less is kept of this place's dead segments: there may be room for a launch."""
        self._memory_freed.set()

    @property
    def failure(self) -> str | None:
        """Why this place is not started again; None if it is."""
        return self._reason if self._state is PlaceState.FAILED else None

    @property
    def expects_a_worker(self) -> bool:
        """Whether a worker will be READY here without anybody's help."""
        if self._stopping.is_set():
            return False
        if self.worker is None:
            return self._state in (PlaceState.STARTING, PlaceState.DEAD)
        return self.worker.condition is not WorkerCondition.READY

    @property
    def modalities(self) -> list[str]:
        """What its checkpoint has towers for, as its last ready worker said; empty before the first."""
        return self._info.modalities if self._info else []

    def status(self) -> WorkerStatus:
        """This place from outside."""
        worker = self.worker
        return WorkerStatus(
            index=self.index,
            epoch=self.epoch,
            state=str(worker.condition if worker else self._state),
            pid=worker.pid if worker else 0,
            in_flight=len(worker.attempts) if worker else 0,
            restarts=self.restarts,
            reason=(worker.reason if worker else "") or self._reason + self._waits_for,
            info=self._info,
        )

    async def _live_once(self) -> bool:
        """One launch from its regions to its burial; whether it was healthy before it ended."""
        self._state = PlaceState.STARTING
        try:
            regions = await asyncio.to_thread(self._launcher.create_regions, self.index, self.epoch)
        except RegionUnavailable as unavailable:
            # At the start this is the configuration's fault; later, readers may hold the memory for a while.
            self._set_dead(str(unavailable), is_final=self.epoch == 1)
            return False
        if self._stopping.is_set():
            regions.close()
            return False
        try:
            worker = self._launch(regions)
        except OSError as error:
            regions.close()
            self._set_dead(f"the process cannot be started: {error.strerror}", is_final=False)
            return False
        status = await worker.ended
        self._bury(worker, regions, status)
        regions.close_link()
        served_long = time.monotonic_ns() - worker.ready_ns > HEALTHY_AFTER_S * 1e9
        return worker.has_served or (worker.ready_ns > 0 and served_long)

    def _launch(self, regions: LaunchRegions) -> Worker:
        processes = self._launcher.spawn(regions)
        link = ControlLink(regions.link, regions.completion_eventfd)
        outbox = Outbox(link.submissions, on_corrupt=self._distrust)
        segment = self._segments.add(self.index, self.epoch, regions.segment, outbox)
        worker = self.worker = Worker(processes, link, segment, outbox)
        asyncio.get_running_loop().add_reader(link.eventfd, self._answer_bell, worker)
        self._answer_bell(worker)
        logger.info("worker %d.%d started (pid %d)", worker.place, worker.epoch, worker.pid)
        return worker

    def _answer_bell(self, worker: Worker) -> None:
        """The worker rings when it has published a record, and when its own state has changed."""
        # First what it says of itself: what it gives back, because it stops, must not go to it again.
        self._observe(worker)
        self._completions.answer_bell(worker)

    def _distrust(self, reason: str) -> None:
        if self.worker is not None:
            self.worker.distrust(reason)

    def _observe(self, worker: Worker) -> None:
        if not worker.observe() or worker.condition is not WorkerCondition.READY:
            return
        try:
            self._info = worker.link.info()
        except RegionCorrupt as corrupt:
            worker.distrust(str(corrupt))
            return
        self._segments.open_to_readers(worker.segment)
        logger.info("worker %d.%d is ready", worker.place, worker.epoch)
        self._on_ready()

    def _bury(self, worker: Worker, regions: LaunchRegions, status: int) -> None:
        """The process has been reaped: hear what it still said, raise the epoch, take over what it had."""
        asyncio.get_running_loop().remove_reader(worker.link.eventfd)
        self._completions.drain_rest(worker)
        self._set_dead(
            worker.reason or _cause_of_death(worker, regions, status), is_final=status == EXIT_CONFIG
        )
        self.worker = None
        self.epoch += 1
        self._on_lost(worker)

    def _set_dead(self, reason: str, *, is_final: bool) -> None:
        self._state = PlaceState.FAILED if is_final else PlaceState.DEAD
        self._reason = reason
        if not self._stopping.is_set():
            logger.error("worker %d.%d ended: %s", self.index, self.epoch, reason)

    async def _wait_for_room(self) -> None:
        """Never by a timer, nor by hanging up: a reader's mapping outlives its session, and rows must not
        change under it. So readers are named, and the place waits for them."""
        while (waits_for := self._lacks_room()) and not self._stopping.is_set():
            if not self._waits_for:
                logger.warning("worker %d.%d is not started%s", self.index, self.epoch, waits_for)
            self._state, self._waits_for = PlaceState.WAITING, waits_for
            self._memory_freed.clear()
            await self._memory_freed.wait()
        self._waits_for = ""

    def _lacks_room(self) -> str:
        """What must be released before a launch, and by whom; empty if nothing."""
        dead = self._segments.dead(self.index)
        kept_bytes = sum(map(self._segments.kept_bytes, dead))
        if kept_bytes <= self._dead_bytes_max and len(dead) <= DEAD_SEGMENTS_MAX:
            return ""
        readers = self._readers(block for segment in dead for block in segment.blocks.values())
        return (
            f"; waits, because {kept_bytes} bytes are kept of {len(dead)} dead workers' segments "
            f"(at most {self._dead_bytes_max}) for {', '.join(readers)}"
        )

    async def _wait(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return


def _cause_of_death(worker: Worker, regions: LaunchRegions, status: int) -> str:
    """In words: its own if it gave up, else its exit status or signal."""
    rank = worker.first_dead_rank
    who = f"rank {rank} " if rank else ""
    if own_words := _own_words(worker, regions, status):
        return f"{who}gave up: {own_words}" if rank else own_words
    if status < 0:
        return f"{who}killed by {signal.Signals(-status).name}"
    return f"{who}exited with status {status}"


def _own_words(worker: Worker, regions: LaunchRegions, status: int) -> str:
    """Why the process that died first gave up, if it said so."""
    try:
        if worker.first_dead_rank and regions.group is not None:
            return rank_failure(regions.group, worker.first_dead_rank)
        if status == EXIT_CONFIG or worker.condition is WorkerCondition.STOPPING:
            return worker.link.failure()
    except RegionCorrupt as corrupt:
        logger.warning("worker %d.%d left no reason: %s", worker.place, worker.epoch, corrupt)
    return ""
