"""Views: what a reader holds of one block, and the lease that lasts as long.

Session.attach makes them. A lease ends once: when the view is released, or when the view and every array
and tensor taken from it are garbage, whichever comes first.
"""

import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from shm.errors import EncodeFailed, RegionCorrupt, StaleHandle, WaitTimeout, WorkerLost
from shm.layout import BlockHeader, BlockState, Dtype
from shm.messages import BlockMetadata, Handle
from shm.segment import SegmentReader

if TYPE_CHECKING:
    import torch

# numpy has no bfloat16: its bits come as uint16 (value = bits << 16, read as float32).
_NUMPY_DTYPES: Final[dict[Dtype, type[np.generic]]] = {
    Dtype.FLOAT32: np.float32,
    Dtype.FLOAT16: np.float16,
    Dtype.BFLOAT16: np.uint16,
}
_DTYPES: Final = {int(dtype): dtype for dtype in Dtype}
_LABELS: Final = {int(dtype): dtype.label for dtype in Dtype}
_WAIT_SLICE_NS: Final = 1_000_000_000


class View:
    """One leased block: rows x dim elements of dtype, read-only, not copied.

    Arrays and tensors taken from a view are valid until its release: copy what must outlive it, and call
    check() after the copy. Every method raises StaleHandle once the view is released or its session is
    closed; check() also when, against the daemon's promise, the block is another request's by now.

    Made by Session.attach. end_lease is called exactly once; check_daemon raises when the daemon is gone.
    """

    def __init__(
        self,
        handle: Handle,
        reader: SegmentReader,
        header: BlockHeader,
        *,
        end_lease: Callable[[], None],
        check_daemon: Callable[[], None],
    ) -> None:
        self.handle: Final = handle
        self.rows: Final = header.rows
        self.dim: Final = header.dim
        self.dtype: Final = _DTYPES[header.dtype]
        self.nbytes: Final = header.nbytes
        self._header = header
        self._check_daemon = check_daemon
        self._metadata: BlockMetadata | None = None
        # Everything that is taken from the view holds this array alive, through the memoryview over it: when
        # the last of them is gone, it is gone, and so is the lease.
        anchor = np.frombuffer(reader.payload(header), dtype=np.uint8)
        self._leased: tuple[SegmentReader, memoryview] | None = (reader, anchor.data)
        self._lease = weakref.finalize(anchor, end_lease)
        # At exit the kernel closes the socket, which ends all leases.
        self._lease.atexit = False

    @property
    def released(self) -> bool:
        """True once the lease has ended."""
        return self._leased is None

    @property
    def metadata(self) -> BlockMetadata:
        """Which item has which rows. RegionCorrupt if it cannot be decoded."""
        if self._metadata is None:
            run = self._reader().metadata(self._current_header())
            self.check()  # the copy above is only good if the block was still ours after it
            try:
                self._metadata = msgspec.msgpack.decode(run, type=BlockMetadata)
            except msgspec.MsgspecError:
                raise RegionCorrupt("the block's metadata cannot be decoded") from None
        self._reader()
        return self._metadata

    @property
    def rows_ready(self) -> int:
        """How many rows, from the first on, are final; all of them once the block is READY."""
        return _rows_ready(self._current_header())

    def numpy(self) -> npt.NDArray[Any]:
        """The rows as a read-only array: (rows, dim), or only (rows_ready, dim) while the block is filling.

        float32 or float16; bfloat16 comes as its bits in uint16. EncodeFailed, WorkerLost, StaleHandle.
        """
        payload, ready = self._ready_rows()
        flat = np.frombuffer(payload, dtype=_NUMPY_DTYPES[self.dtype])
        return flat.reshape(self.rows, self.dim)[:ready]

    def torch(self) -> "torch.Tensor":
        """As numpy(), a tensor of the real dtype. EncodeFailed, WorkerLost, StaleHandle.

        Never write into it: the pages are read-only and the process ends. clone() it first.
        """
        from shm.torch_view import as_tensor  # here, because most readers of numpy rows have no torch

        payload, ready = self._ready_rows()
        tensor = as_tensor(payload, self.rows, self.dim, self.dtype)
        return tensor if ready == self.rows else tensor[:ready]

    def wait_rows(self, count: int, timeout: float | None = None) -> int:
        """Sleep until at least `count` rows are final; how many are. timeout: seconds, None for ever.

        WaitTimeout, EncodeFailed, WorkerLost (its worker died), SessionClosed (the daemon died), StaleHandle.
        """
        if not 0 <= count <= self.rows:
            raise ValueError(f"{count} rows of {self.rows}")
        deadline_ns = _deadline_ns(timeout)
        while True:
            header = self._current_header()
            if header.state == BlockState.READY or header.rows_ready >= count:
                return _rows_ready(header)
            self._sleep_until_change(header, deadline_ns)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Sleep until all rows are final and the encode has ended well. Errors as wait_rows."""
        deadline_ns = _deadline_ns(timeout)
        while True:
            header = self._current_header()
            if header.state == BlockState.READY:
                return
            self._sleep_until_change(header, deadline_ns)

    def check(self) -> None:
        """Raise unless what was read so far is this request's: StaleHandle, EncodeFailed, WorkerLost."""
        self._current_header()

    def release(self) -> None:
        """End the lease now; the second time nothing happens. Arrays taken from here are not valid then."""
        leased, self._leased = self._leased, None
        if leased is not None:
            leased[1].release()
            self._lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        shape = f"{self.rows} x {self.dim} {self.dtype.label}"
        return f"<View {shape}{', released' if self.released else ''}>"

    def _still_leased(self) -> tuple[SegmentReader, memoryview]:
        """The reader and the payload's bytes, for as long as the lease lasts."""
        leased = self._leased
        if leased is None:
            raise StaleHandle("this view was released")
        return leased

    def _reader(self) -> SegmentReader:
        return self._still_leased()[0]

    def _current_header(self) -> BlockHeader:
        """The block's header, which is this handle's and has not failed."""
        self._header = leased_header(self._reader(), self.handle)
        return self._header

    def _ready_rows(self) -> tuple[memoryview, int]:
        """The payload, and how many of its rows may be shown: what lies behind them is not ours yet."""
        payload = self._still_leased()[1]
        # READY is final while the lease lasts, so it is looked up once.
        header = self._header if self._header.state == BlockState.READY else self._current_header()
        return payload, _rows_ready(header)

    def _sleep_until_change(self, seen: BlockHeader, deadline_ns: int | None) -> None:
        """One futex wait. In slices, because a daemon that dies closes the socket but wakes no futex."""
        remaining_ns = _WAIT_SLICE_NS if deadline_ns is None else deadline_ns - time.monotonic_ns()
        if remaining_ns <= 0:
            raise WaitTimeout(f"{seen.rows_ready} of {seen.rows} rows were there in time")
        slice_ns = min(remaining_ns, _WAIT_SLICE_NS)
        if not self._reader().wait_change(self.handle.block, seen.change_seq, slice_ns):
            self._check_daemon()


def leased_header(reader: SegmentReader, handle: Handle) -> BlockHeader:
    """The header of the very block that the handle was given for: FILLING or READY.

    StaleHandle if the block is another request's now, EncodeFailed or WorkerLost if its rows will never come.
    """
    header = reader.header(handle.block)
    if header.generation != handle.generation or header.state in (BlockState.FREE, BlockState.RETIRED):
        raise StaleHandle("the block belongs to another request now")
    shape = (header.offset, header.nbytes, header.rows, header.dim, _LABELS[header.dtype])
    if shape != (handle.offset, handle.nbytes, handle.rows, handle.dim, handle.dtype):
        raise StaleHandle("the handle describes another block")
    if header.state == BlockState.FAILED:
        raise EncodeFailed("the encode failed; its rows will never come")
    if header.state == BlockState.LOST:
        raise WorkerLost("the worker died before all rows were there; ask for the encode again")
    return header


def _rows_ready(header: BlockHeader) -> int:
    return header.rows if header.state == BlockState.READY else header.rows_ready


def _deadline_ns(timeout: float | None) -> int | None:
    return None if timeout is None else time.monotonic_ns() + round(timeout * 1e9)
