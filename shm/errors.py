"""Errors of the data plane, by cause. Raised by shm, caught by app and gpu_workers, and by prefill's code.

ErrorCode is what crosses a ring: numbers only. `app.errors` turns a code into an HTTP status and a text.
"""

from enum import IntEnum, unique


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
    # The worker's state (5xx or retried): from 100 on.
    SEGMENT_FULL = 100
    OUT_OF_DEVICE_MEMORY = 101
    FORWARD_FAILED = 102
    DEADLINE = 103
    CANCELLED = 104
    WORKER_LOST = 105
    INTERNAL = 106
