"""All places together: runs them, looks after their progress, says who is ready. One per engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from app.place import Place, WorkerStatus
from app.worker import Worker, WorkerCondition

KILL_LIMIT_S = 10.0  # a killed process that is not gone by then hangs in the kernel; it is left behind


class Supervisor:
    """Keeps a worker in each place. Nothing here waits for a worker on the event loop.

    beats: how often it has looked after all places and their work.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        heartbeat_s: float,
        stall_s: float,
        slow_s: float,
        on_beat: Callable[[], None],
    ) -> None:
        """on_beat: called after every look at the places."""
        self._places = places
        self._heartbeat_s = heartbeat_s
        self._stall_ns = int(stall_s * 1e9)
        self._slow_ns = int(slow_s * 1e9)
        self._on_beat = on_beat
        self.beats = 0
        self._lives: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin every place's life; returns at once."""
        self._lives = [
            asyncio.create_task(place.run(), name=f"place-{place.index}") for place in self._places
        ]
        self._beat()

    def workers(self) -> Iterator[Worker]:
        """The living, in order of place."""
        return (place.worker for place in self._places if place.worker is not None)

    def expects_a_worker(self) -> bool:
        """Whether a worker is starting, or about to be started."""
        return any(place.expects_a_worker for place in self._places)

    def is_ready(self) -> bool:
        """Whether one worker at least takes work."""
        return any(worker.condition is WorkerCondition.READY for worker in self.workers())

    def serves(self, modality: str) -> bool:
        """Whether some checkpoint has a tower for it, or none has been loaded yet."""
        return any(modality in place.modalities for place in self._places) or not self.modalities()

    def modalities(self) -> list[str]:
        """What the loaded checkpoints have towers for, in order."""
        return sorted({name for place in self._places for name in place.modalities})

    def memory_freed(self, place: int) -> None:
        """Readers have let go of memory of this place's dead workers."""
        self._places[place].memory_freed()

    async def failed(self) -> str:
        """Returns, with the reason, once no place will be started again because all are misconfigured.

        Raises what a place's life ended with, if that is a bug.
        """
        done, _ = await asyncio.wait(self._lives, return_when=asyncio.FIRST_EXCEPTION)
        for life in done:
            life.result()
        return next((place.failure for place in self._places if place.failure), "all workers were stopped")

    async def stop(self) -> None:
        """Drain, terminate, then kill every worker, and bury it."""
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(place.stop() for place in self._places))
        if self._lives:
            await asyncio.wait(self._lives, timeout=KILL_LIMIT_S)

    def statuses(self) -> list[WorkerStatus]:
        """Every place, in order."""
        return [place.status() for place in self._places]

    def _beat(self) -> None:
        # Set first: whatever happens below, there is a next beat.
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)
        for place in self._places:
            place.check(stall_ns=self._stall_ns, slow_ns=self._slow_ns)
        self._on_beat()
        self.beats += 1
