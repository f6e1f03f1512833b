"""What an encode will cost its worker, before and after its shape is known. Called by `app.dispatch`.

The unit is the row of embeddings. At admission only bytes and items are known; how many rows they stand for
is learned for each modality from the shapes that workers report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from app.jobs import EncodeJob

ITEM_BYTES: Final = 16 << 10  # what an item costs beside its bytes, in bytes
FIRST_ROWS_PER_ITEM: Final = 256
MEMORY: Final = 0.98  # weight of all shapes before, for each new one


@dataclass(slots=True)
class _Seen:
    size_bytes: float = ITEM_BYTES
    rows: float = FIRST_ROWS_PER_ITEM


class CostModel:
    """Rows per byte of input, by modality. One per engine."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def estimate(self, job: EncodeJob) -> int:
        """Rows that this job will probably have; at least one for each item."""
        seen = self._seen.get(job.modality) or _Seen()
        return max(job.item_count, round(_size_bytes(job) * seen.rows / seen.size_bytes))

    def learn(self, job: EncodeJob, rows: int) -> None:
        """The worker has reported the job's shape."""
        seen = self._seen.setdefault(job.modality, _Seen())
        seen.size_bytes = seen.size_bytes * MEMORY + _size_bytes(job)
        seen.rows = seen.rows * MEMORY + rows


def _size_bytes(job: EncodeJob) -> int:
    return job.block.nbytes + job.item_count * ITEM_BYTES
