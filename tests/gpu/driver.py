"""Control's part, played fast: keeps a worker's queue full and gives every block back."""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from shm.arena import InputBlock
from shm.layout import Completion, CompletionKind, Dtype
from shm.torch_view import as_tensor
from tests.gpu.scale import Scale
from tests.gpu_workers.harness import Harness


@dataclass(frozen=True)
class Run:
    """What a worker did with a number of pictures."""

    pictures: int
    seconds: float
    forward_seconds: float  # in which a forward was under way, each batch counted once
    copy_seconds: float  # from the end of a forward until its rows were in their blocks
    mean_batch_items: float

    @property
    def images_per_s(self) -> float:
        """Over the whole run."""
        return self.pictures / self.seconds


class Driver(Harness):
    """A real worker on real regions."""

    def __init__(self, scale: Scale, checkpoint: Path, dtype: torch.dtype) -> None:
        super().__init__(
            scale.segment_bytes,
            scale.arena_bytes,
            checkpoint=str(checkpoint),
            tower="auto",
            device=scale.device,
            dtype=str(dtype).removeprefix("torch."),
            max_batch_items=scale.max_batch_items,
            max_batch_patches=scale.max_batch_patches,
            preprocess_threads=scale.prepare_threads,
        )
        self._in_flight = scale.in_flight

    def tensor_of(self, file: bytes) -> torch.Tensor:
        """A copy of the rows of one picture."""
        ticket = self.submit(file)
        end = self.outcome_of(ticket).end
        self._blocks.pop().free()
        self._check(end)
        header = self.header(end)
        rows = as_tensor(self.segment.payload(header), end.rows, end.dim, Dtype(header.dtype)).clone()
        self.reclaim(end)
        return rows

    def encode(self, files: list[bytes], count: int) -> Run:
        """count pictures, the files over and over, with as many in flight as the scale says."""
        pictures = itertools.islice(itertools.cycle(files), count)
        under_way: dict[int, InputBlock] = {}
        ends: list[Completion] = []
        started = time.perf_counter()
        for file in itertools.islice(pictures, self._in_flight):
            self._start(file, under_way)
        while under_way:
            record = self._next_record()
            if record.kind is CompletionKind.SHAPE_KNOWN:
                continue
            self._check(record)
            under_way.pop(record.ticket).free()
            self.reclaim(record)
            ends.append(record)
            for file in itertools.islice(pictures, 1):
                self._start(file, under_way)
        seconds = time.perf_counter() - started
        # A batch's times stand in the record of each of its items.
        return Run(
            pictures=len(ends),
            seconds=seconds,
            forward_seconds=sum(end.forward_us / end.batch_items for end in ends) / 1e6,
            copy_seconds=sum(end.copy_us / end.batch_items for end in ends) / 1e6,
            mean_batch_items=len(ends) / sum(1 / end.batch_items for end in ends),
        )

    def _start(self, file: bytes, under_way: dict[int, InputBlock]) -> None:
        ticket = self.submit(file)
        under_way[ticket] = self._blocks.pop()

    def _check(self, end: Completion) -> None:
        assert end.kind is CompletionKind.READY, f"{end}\n" + "\n".join(self.log[-20:])
