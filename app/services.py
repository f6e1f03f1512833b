"""What a request's handlers need, in one place. Built once by `app.server`."""

from app.admission import Admission
from app.config import ServeConfig
from app.engine import Engine
from app.errors import NoWorkerReady
from app.ingest import Ingest
from app.loop_monitor import LoopMonitor


class Services:
    """The daemon's parts. The engine comes last: until then there is no worker, but probes are answered."""

    def __init__(self, config: ServeConfig, ingest: Ingest) -> None:
        self.config = config
        self.ingest = ingest
        self.loop_monitor = LoopMonitor()
        self.admission = Admission(
            config.max_queued_requests,
            self.some_worker_ready,
            max_queued_bytes=config.max_queued_bytes,
            check_room=self.check_room,
        )
        self._engine: Engine | None = None

    def engine_started(self, engine: Engine) -> None:
        """From here on requests are admitted as soon as a worker is ready."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """NoWorkerReady while it starts."""
        if self._engine is None:
            raise NoWorkerReady("the daemon is starting", retry_after_s=1.0)
        return self._engine

    def some_worker_ready(self) -> bool:
        """Whether an encode that came now would find a worker."""
        return self._engine is not None and self._engine.ready()

    def check_room(self, nbytes: int) -> None:
        """MemoryFull or QueueFull if a request of nbytes of media would not find room soon."""
        self.engine.check_room(nbytes)
