"""The device thread: forwards, one batch after the other."""

import time
from collections.abc import Callable

from gpu_workers.backlog import Backlog
from gpu_workers.deliver import Encoded, EncodedBatch
from gpu_workers.device import Device
from gpu_workers.families.base import Family
from gpu_workers.faults import Faults
from gpu_workers.heart import Heart
from gpu_workers.isolation import Encoder
from gpu_workers.jobs import Item
from gpu_workers.ranks import Alone, Ranks


class DeviceLoop:
    """Runs on the main thread until the backlog is finished."""

    def __init__(
        self,
        backlog: Backlog,
        family: Family,
        device: Device,
        deliver: Callable[[EncodedBatch], None],
        heart: Heart,
        faults: Faults,
        ranks: Ranks | None = None,
    ) -> None:
        """deliver: Deliverer.deliver, or DeliverThread.put. ranks: of a group, None for a single process."""
        self._backlog = backlog
        self._device = device
        self._deliver = deliver
        self._heart = heart
        self._ranks = ranks or Alone(family)
        self._encoder = Encoder(family, device, faults, self._ranks)

    def run(self) -> None:
        """Forward what waits, at once. DeviceLost when the device's context is broken."""
        while (batch := self._backlog.take_batch()) is not None:
            self._deliver(self._encode_batch(batch))

    def encode(self, batch: list[Item]) -> list[Encoded]:
        """Rows or error of every item, in order: see Encoder.encode."""
        return self._encoder.encode(batch)

    def _encode_batch(self, batch: list[Item]) -> EncodedBatch:
        with self._heart.step():
            started_ns = time.monotonic_ns()
            own, answers = self._ranks.hand_out(batch)
            encoded = self._encoder.encode(own) if own else []
            return EncodedBatch(encoded, started_ns, self._device.mark(), answers)
