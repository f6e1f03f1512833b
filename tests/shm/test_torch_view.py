"""shm.torch_view: tensors without a copy, over memory that cannot be written."""

import mmap
import subprocess
import sys

import pytest
import torch

from shm.layout import Dtype
from shm.torch_view import as_tensor

TORCH = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}
SILENT = """
import warnings
warnings.simplefilter("error")
from shm.layout import Dtype
from shm.torch_view import as_tensor
assert as_tensor(memoryview(bytes(64)), 2, 8, Dtype.FLOAT32).sum() == 0
"""


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_tensor_has_the_payloads_values_shape_and_dtype(dtype: Dtype) -> None:
    expected = torch.arange(24).reshape(4, 6).to(TORCH[dtype])
    payload = expected.contiguous().view(torch.uint8).numpy().tobytes()
    tensor = as_tensor(memoryview(payload), 4, 6, dtype)
    assert tensor.dtype is TORCH[dtype]
    assert torch.equal(tensor, expected)


def test_a_tensor_is_not_a_copy_and_outlives_the_view_it_came_from() -> None:
    memory = mmap.mmap(-1, 4096)
    view = memoryview(memory).toreadonly()
    tensor = as_tensor(view, 2, 4, Dtype.FLOAT32)
    view.release()
    memory[0:4] = torch.tensor([5.0]).numpy().tobytes()
    assert tensor[0, 0] == 5
    with pytest.raises(BufferError):
        memory.close()
    del tensor
    memory.close()


def test_the_warning_about_read_only_memory_is_silenced() -> None:
    subprocess.run([sys.executable, "-c", SILENT], check=True)
