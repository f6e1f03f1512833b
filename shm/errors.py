"""Errors of the data plane, by cause. Raised by shm, caught by app and gpu_workers, and by prefill's code.

ErrorCode is what crosses a ring: numbers only. `app.errors` turns a code into an HTTP status and a text.
"""

from enum import IntEnum, unique
from typing import Final, NamedTuple, Self


class ShmError(Exception):
    """Base of everything that shm raises on purpose."""


class RegionCorrupt(ShmError):
    """A shared word holds what its writer never stores. Stop trusting that region."""


class StaleHandle(ShmError):
    """The handle's lease has ended, or its block now belongs to another request."""


class WorkerLost(ShmError):
    """The worker died before the block was READY. Ask for the encode again."""


class EncodeFailed(ShmError):
    """The block ended FAILED while a reader waited for its rows."""


class SessionClosed(ShmError):
    """The daemon ended the session, or refused it."""


class LeaseRefused(ShmError):
    """The session holds its cap of leased bytes; release something first."""


class WaitTimeout(ShmError):
    """The rows were not there within the caller's timeout."""


class RegionUnavailable(ShmError):
    """A region of this size cannot be had; the message names wanted, available and the fix."""


@unique
class ErrorCode(IntEnum):
    """Why an encode failed, as it stands in a completion record's `error` field.

    `error_item` names the item; `error_value` and `error_limit` carry the two numbers of the message.
    """

    NONE = 0
    # The item: the caller's fault (4xx).
    NOT_AN_IMAGE = 1
    TRUNCATED = 2
    UNSUPPORTED_FORMAT = 3
    TOO_MANY_PIXELS = 4
    ASPECT_RATIO = 5
    EMPTY_ITEM = 6
    DECODE_FAILED = 7
    MODALITY_UNSUPPORTED = 8
    TOO_LARGE_FOR_SEGMENT = 9
    NOT_A_VIDEO = 10
    NO_VIDEO_STREAM = 11
    TOO_FEW_FRAMES = 12
    TOO_MANY_FRAMES = 13
    FRAME_SIZES_DIFFER = 14
    NOT_AUDIO = 15
    NO_AUDIO_STREAM = 16
    NOT_FINITE = 17
    TOO_LONG = 18
    BAD_OPTION = 19
    BAD_TENSORS = 20
    KIND_UNSUPPORTED = 21
    TOO_SHORT = 22
    # Of processed tensors; error_value is a TensorFault, packed.
    TENSOR_MISSING = 30
    TENSOR_TYPE = 31  # limit: 0 floats wanted, 1 integers wanted
    TENSOR_DIMENSIONS = 32
    TENSOR_SIZE = 33
    TENSOR_MULTIPLE = 34
    TENSOR_VALUE = 35
    TENSOR_NOT_FINITE = 36
    # The worker's state (5xx or retried): from 100 on.
    SEGMENT_FULL = 100
    OUT_OF_DEVICE_MEMORY = 101
    FORWARD_FAILED = 102
    DEADLINE = 103
    CANCELLED = 104
    WORKER_LOST = 105
    INTERNAL = 106


# What processors call their tensors, by number: append only. A name that is not here has number 0.
_TENSOR_NAMES: Final = (
    "a tensor",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "image_sizes",
    "input_features",
    "feature_attention_mask",
    "input_features_mask",
    "audio_feature_lengths",
    "attention_mask",
    "pixel_attention_mask",
    "input_values",
    "padding_mask",
    "image_sizes_videos",
    "spatial_shapes",
    "image_position_ids",
    "video_position_ids",
    "pixel_mask",
    "batch_num_images",
)
_AXIS_SHIFT: Final = 48
_NAME_SHIFT: Final = 56
_SIZE_MASK: Final = (1 << _AXIS_SHIFT) - 1


class TensorFault(NamedTuple):
    """What is wrong with one tensor of a processed item, as one number of a record.

    The name is in the high byte, the axis in the next, and a size, a count or an element below.
    """

    name: str
    axis: int = 0
    found: int = 0

    def pack(self) -> int:
        """64 bits. found is clamped to 48."""
        number = _TENSOR_NAMES.index(self.name) if self.name in _TENSOR_NAMES else 0
        return number << _NAME_SHIFT | self.axis << _AXIS_SHIFT | min(max(self.found, 0), _SIZE_MASK)

    @classmethod
    def unpack(cls, value: int) -> Self:
        """From a record, which is input: a number without a name is "a tensor"."""
        number, axis = value >> _NAME_SHIFT & 0xFF, value >> _AXIS_SHIFT & 0xFF
        known = number if number < len(_TENSOR_NAMES) else 0
        return cls(_TENSOR_NAMES[known], axis, value & _SIZE_MASK)
