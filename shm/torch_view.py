"""The one module of shm that imports torch: a tensor over a block's payload, without a copy.

Called by View.torch(), and only then, so that a process that wants numpy never loads torch.
"""

import warnings
from typing import Final

import torch

from shm.layout import Dtype

_TORCH_DTYPES: Final = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
}


def as_tensor(payload: memoryview, rows: int, dim: int, dtype: Dtype) -> torch.Tensor:
    """(rows, dim) of dtype over payload (at least that many bytes, contiguous), without a copy.

    The memory is mapped read-only: writing into the tensor ends the process. `clone()` it first. The tensor
    keeps whatever backs payload alive.
    """
    # A view of its own: torch keeps the object, not its buffer, and the caller may release `payload`.
    flat = torch.frombuffer(memoryview(payload), dtype=_TORCH_DTYPES[dtype], count=rows * dim)
    return flat.view(rows, dim)


def _spend_read_only_warning() -> None:
    """torch warns once in a process that the buffer cannot be written. Spend that one here.

    Not around each call: warnings.catch_warnings changes filters for every thread of the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        torch.frombuffer(b"\0", dtype=torch.uint8)


_spend_read_only_warning()
