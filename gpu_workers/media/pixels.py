"""Decoded frames -> pixel_values, as Hugging Face's Qwen2VLImageProcessor and video processors make them.

Called by the families of that processor, from any number of threads at once. HostPixels gives the same bits
as the processor (torchvision backend) on the CPU, in a third of its time; TorchPixels works on any torch
device (--preprocess-device). What takes the processor's time, and what is done about it here:

- torchvision resizes 8-bit pictures several times faster where the channels of a pixel lie together, as
  decoders leave them;
- normalised 8-bit pixels have 256 values per channel: the processor's own arithmetic makes a table of them
  once, and _pixels.patchify looks them up. No float picture ever exists, each value is computed once;
- fresh memory for 50 MB of patches costs more in page faults than the rest together: it is taken in huge
  pages.
"""

import contextlib
import logging
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms.v2 import functional
from transformers.image_utils import pil_torch_interpolation_mapping

from gpu_workers import _pixels
from gpu_workers.errors import ConfigurationError, ItemError
from shm.errors import ErrorCode

logger = logging.getLogger(__name__)

Frames: TypeAlias = npt.NDArray[np.uint8]  # (frames, height, width, 3), C-contiguous; may be read-only
Frame: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)

_CHANNELS: Final = 3
_LEVELS: Final = 256
# glibc keeps freed blocks below this for the next picture; larger ones come fresh from the kernel each time.
_KEPT_BY_MALLOC_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Of a patch: pixels a side, patches a side of what becomes one row, frames together."""

    patch: int
    merge: int
    temporal: int

    def row_width(self) -> int:
        """Elements of a row of pixel_values."""
        return _CHANNELS * self.temporal * self.patch**2


class Pixels(Protocol):
    """One loaded processor's pixel arithmetic."""

    def pixel_values(self, frames: Frames, height: int, width: int) -> torch.Tensor:
        """Frames (a picture is one) resized to height x width pixels, normalised, cut into patches.

        (steps * grid_h * grid_w, 3 * temporal * patch * patch), steps = ceil(frames / temporal): rows by
        groups of merge x merge patches, elements by channel, frame, line, column. The last frame fills up
        the last step. Height and width are multiples of patch * merge.
        """

    def pixel_values_of(
        self, frames: Iterable[tuple[int, Frame]], count: int, height: int, width: int
    ) -> torch.Tensor:
        """As pixel_values, of `count` frames that come one by one with their places: each is made small
        before the next one is asked for, so that a video never lies in memory at its own size."""


def open_pixels(
    processor: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    where: Literal["auto", "cpu", "device"] = "auto",
) -> Pixels:
    """For processor and a tower on device. ConfigurationError for a processor that does not do what this
    module does.

    processor: of the Qwen2VLImageProcessor kind. dtype: the processor's float32 values are rounded to it.
    where: "auto" is device if that is no CPU.
    """
    if not processor.do_resize or not (processor.do_rescale or processor.do_normalize):
        raise ConfigurationError("an image processor that does not resize and scale is not supported")
    if where == "cpu" or (where == "auto" and device.type == "cpu"):
        return HostPixels(processor, dtype)
    logger.info("pixels are resized and normalised on %s", device)
    return TorchPixels(processor, dtype, device)


class HostPixels:
    """On the CPU. Equal, bit for bit, to the processor."""

    def __init__(self, processor: Any, dtype: torch.dtype) -> None:
        """dtype: float32, bfloat16 or float16."""
        self._layout = _layout(processor)
        self._interpolation = pil_torch_interpolation_mapping[processor.resample]
        self._dtype = dtype
        levels = torch.arange(_LEVELS, dtype=torch.uint8).view(1, _LEVELS, 1).repeat(_CHANNELS, 1, 1)
        self._table = _normalised(processor, levels).to(dtype).contiguous()

    def pixel_values(self, frames: Frames, height: int, width: int) -> torch.Tensor:
        """See Pixels."""
        channels_first = torch.from_dlpack(frames).permute(0, 3, 1, 2)
        resized = functional.resize(channels_first, [height, width], self._interpolation, antialias=True)
        steps = math.ceil(len(frames) / self._layout.temporal)
        patches = steps * (height // self._layout.patch) * (width // self._layout.patch)
        values = _uninitialised(patches, self._layout.row_width(), self._dtype)
        _pixels.patchify(
            resized.permute(0, 2, 3, 1).contiguous().numpy(),  # a copy for pictures one pixel wide alone
            _bits(self._table),
            _bits(values),
            len(frames),
            height,
            width,
            self._layout.patch,
            self._layout.merge,
            self._layout.temporal,
        )
        return values

    def pixel_values_of(
        self, frames: Iterable[tuple[int, Frame]], count: int, height: int, width: int
    ) -> torch.Tensor:
        """See Pixels."""
        small = np.empty((count, height, width, _CHANNELS), np.uint8)
        for place, frame in frames:
            resized = functional.resize(
                _channels_first(frame), [height, width], self._interpolation, antialias=True
            )
            small[place] = resized.permute(1, 2, 0).numpy()
        return self.pixel_values(small, height, width)


class TorchPixels:
    """On a torch device, where 8-bit frames go instead of floats: an eighth of the bytes in float32.

    On the CPU equal to HostPixels. On CUDA torchvision resizes in float and rounds, on the CPU with 16-bit
    weights: a value may differ by one of the 255 levels, 1 / (255 * image_std) after normalising.
    """

    def __init__(self, processor: Any, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: float32, bfloat16 or float16."""
        self._processor = processor
        self._layout = _layout(processor)
        self._interpolation = pil_torch_interpolation_mapping[processor.resample]
        self._dtype = dtype
        self._device = device

    def pixel_values(self, frames: Frames, height: int, width: int) -> torch.Tensor:
        """See Pixels. The result is on the device, complete on the device's default stream."""
        with device_memory():
            channels_first = torch.from_dlpack(frames).to(self._device).permute(0, 3, 1, 2)
            resized = functional.resize(channels_first, [height, width], self._interpolation, antialias=True)
            return self._values(resized)

    def pixel_values_of(
        self, frames: Iterable[tuple[int, Frame]], count: int, height: int, width: int
    ) -> torch.Tensor:
        """See Pixels. Frames go to the device at their own size, one at a time."""
        with device_memory():
            small = torch.empty((count, _CHANNELS, height, width), dtype=torch.uint8, device=self._device)
            for place, frame in frames:
                uploaded = _channels_first(frame).to(self._device)
                small[place] = functional.resize(
                    uploaded, [height, width], self._interpolation, antialias=True
                )
            return self._values(small)

    def _values(self, frames: torch.Tensor) -> torch.Tensor:
        """(frames, 3, height, width) in 8 bits, of their final size -> pixel_values."""
        patches = self._patches(frames)
        return _normalised(self._processor, patches).view(-1, self._layout.row_width()).to(self._dtype)

    def _patches(self, frames: torch.Tensor) -> torch.Tensor:
        """(frames, 3, height, width) -> (rows, 3, temporal * patch, patch), still in 8 bits: one copy."""
        layout = self._layout
        count, channels, height, width = frames.shape
        if missing := -count % layout.temporal:
            frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
        groups = frames.reshape(
            -1,
            layout.temporal,
            channels,
            height // layout.patch // layout.merge,
            layout.merge,
            layout.patch,
            width // layout.patch // layout.merge,
            layout.merge,
            layout.patch,
        )
        by_row = groups.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return by_row.reshape(-1, channels, layout.temporal * layout.patch, layout.patch)


@contextlib.contextmanager
def device_memory() -> Iterator[None]:
    """What runs in it for one item: a device without memory for it is ItemError(OUT_OF_DEVICE_MEMORY)."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ItemError(ErrorCode.OUT_OF_DEVICE_MEMORY) from None


def _channels_first(frame: Frame) -> torch.Tensor:
    return torch.from_dlpack(np.ascontiguousarray(frame)).permute(2, 0, 1)


def _layout(processor: Any) -> PatchLayout:
    return PatchLayout(processor.patch_size, processor.merge_size, processor.temporal_patch_size)


def _normalised(processor: Any, images: torch.Tensor) -> torch.Tensor:
    """What the processor makes of 8-bit (..., 3, height, width): float32, by its own code."""
    values: torch.Tensor = processor.rescale_and_normalize(
        images,
        processor.do_rescale,
        processor.rescale_factor,
        processor.do_normalize,
        tuple(processor.image_mean),
        tuple(processor.image_std),
    )
    return values


def _bits(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory; numpy has no bfloat16."""
    return memoryview(tensor.view(torch.uint8).numpy())


def _uninitialised(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, width); what comes fresh from the kernel, in huge pages where it grants them."""
    nbytes = rows * width * dtype.itemsize
    if nbytes < _KEPT_BY_MALLOC_BYTES:
        return torch.empty(rows, width, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: slower and otherwise the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    values: torch.Tensor = torch.frombuffer(memory, dtype=dtype).view(rows, width)  # keeps the mapping alive
    return values
