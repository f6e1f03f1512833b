"""Every way a request can end without an answer: one class per cause, one table to statuses and texts.

Raised by the HTTP half and by the engine; turned into a response in `app.problem` and nowhere else.
Messages name the field and the limit; they never hold an address, a path or a traceback.
"""

from dataclasses import dataclass
from typing import Final

from shm.errors import ErrorCode, TensorFault


class ConfigError(Exception):
    """The daemon cannot start as asked; the message names the option and the value. Exit status 78."""


class RequestError(Exception):
    """Base of what ends a request. item_index: which of mm_items; retry_after_s: when to come again."""

    def __init__(
        self, message: str, *, item_index: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.item_index = item_index
        self.retry_after_s = retry_after_s


# --- the request itself ---
class InvalidRequest(RequestError):
    """The body is not JSON, or a field is missing, of the wrong type or out of range."""


class UnsupportedMediaType(RequestError):
    """The Content-Type is not JSON, or the body is compressed."""


class BodyTooLarge(RequestError):
    """The body passes --max-body-size."""


class BodyTimeout(RequestError):
    """The body stopped coming."""


class NotFound(RequestError):
    """No such route, or a nonce that names no live handle."""


class MethodNotAllowed(RequestError):
    """The route exists under another method."""


class HandleAttached(RequestError):
    """The handle's lease is a session's."""


class DuplicateRequest(RequestError):
    """The same req_id with other media is under way."""


class ModalityNotServed(RequestError):
    """No worker's checkpoint has a tower for this modality."""


# --- one of its items ---
class InvalidItem(RequestError):
    """Broken base64, an empty item, a shape that is none of those that mm_items takes."""


class ItemTooLarge(RequestError):
    """An item passes the limit of bytes, or its rows could never fit a segment."""


class ItemRefused(RequestError):
    """Policy: the address, domain, scheme or path is not allowed."""


class ItemUnavailable(RequestError):
    """The media host, or the file, did not give the bytes."""


class ItemHostFailed(RequestError):
    """The media host answered 5xx, 408 or 429, or the connection broke. Worth a retry."""


class ItemHostTimeout(RequestError):
    """The media host did not answer in time. Worth a retry."""


class ItemUndecodable(RequestError):
    """The bytes are not a picture that can be encoded: decoder, format, pixels or aspect ratio."""


class PoisonInput(RequestError):
    """Two workers died while they had this content; it is refused for ten minutes."""


# --- the daemon's state ---
class QueueFull(RequestError):
    """As many requests as --max-queued-requests are under way, or no ring has room."""


class MemoryFull(RequestError):
    """The input arena or a segment has no room now."""


class NoWorkerReady(RequestError):
    """No worker is loaded and fresh."""


class Draining(RequestError):
    """The daemon is stopping."""


class WorkerLost(RequestError):
    """The worker died, and so did the one that had the second try."""


class DeadlinePassed(RequestError):
    """The request's own time limit."""


class OutOfDeviceMemory(RequestError):
    """The item alone does not fit the device."""


class EncodeFault(RequestError):
    """The forward, or the daemon, failed: a bug or broken hardware, never the input's fault."""


class RequestCancelled(RequestError):
    """The client went away. Nobody reads the answer; it is counted."""


@dataclass(frozen=True, slots=True)
class Cause:
    """How one cause looks from outside. retryable: the same request may succeed later."""

    status: int
    code: str
    title: str
    retryable: bool = False


CAUSES: Final[dict[type[RequestError], Cause]] = {
    InvalidRequest: Cause(400, "invalid_request", "The request is malformed"),
    UnsupportedMediaType: Cause(415, "unsupported_media_type", "The body must be plain JSON"),
    BodyTooLarge: Cause(413, "body_too_large", "The body is too large"),
    BodyTimeout: Cause(408, "body_timeout", "The body did not arrive in time", True),
    NotFound: Cause(404, "not_found", "There is no such thing"),
    MethodNotAllowed: Cause(405, "method_not_allowed", "The method is not allowed here"),
    HandleAttached: Cause(409, "handle_attached", "A session has attached this handle"),
    DuplicateRequest: Cause(409, "duplicate_request", "This req_id is under way with other media"),
    ModalityNotServed: Cause(422, "modality_not_served", "The modality is not served"),
    InvalidItem: Cause(400, "invalid_item", "An item is malformed"),
    ItemTooLarge: Cause(413, "item_too_large", "An item is too large"),
    ItemRefused: Cause(403, "item_refused", "An item is refused by policy"),
    ItemUnavailable: Cause(422, "item_unavailable", "An item could not be read"),
    ItemHostFailed: Cause(422, "item_host_failed", "The media host failed", True),
    ItemHostTimeout: Cause(504, "item_host_timeout", "The media host did not answer in time", True),
    ItemUndecodable: Cause(422, "item_undecodable", "An item cannot be encoded"),
    PoisonInput: Cause(422, "poison_input", "Workers die of this content"),
    QueueFull: Cause(429, "queue_full", "Too many requests are under way", True),
    MemoryFull: Cause(503, "memory_full", "There is no room for this request now", True),
    NoWorkerReady: Cause(503, "no_worker_ready", "No worker is ready", True),
    Draining: Cause(503, "draining", "The daemon is stopping", True),
    WorkerLost: Cause(503, "worker_lost", "The worker died", True),
    DeadlinePassed: Cause(504, "deadline_passed", "The deadline passed", True),
    OutOfDeviceMemory: Cause(503, "out_of_device_memory", "The device has no memory for this", True),
    EncodeFault: Cause(500, "encode_fault", "The encode failed"),
    RequestCancelled: Cause(499, "cancelled", "The client went away"),
}


def cause_of(error: RequestError) -> Cause:
    """The table's entry for this error's class."""
    return CAUSES[type(error)]


# A worker's error code -> (class, text). {value} and {limit} are the record's two numbers, {fault} is
# the first one where it describes a tensor.
_WORKER_ERRORS: Final[dict[ErrorCode, tuple[type[RequestError], str]]] = {
    ErrorCode.NOT_AN_IMAGE: (ItemUndecodable, "is not an image"),
    ErrorCode.TRUNCATED: (ItemUndecodable, "is truncated"),
    ErrorCode.UNSUPPORTED_FORMAT: (ItemUndecodable, "is in a format that is not supported"),
    ErrorCode.TOO_MANY_PIXELS: (ItemUndecodable, "has {value} pixels; the limit is {limit}"),
    ErrorCode.ASPECT_RATIO: (ItemUndecodable, "has an aspect ratio of {value}; the limit is {limit}"),
    ErrorCode.EMPTY_ITEM: (InvalidItem, "is empty"),
    ErrorCode.DECODE_FAILED: (ItemUndecodable, "cannot be decoded"),
    ErrorCode.BAD_OPTION: (InvalidItem, "has processor options that this model's processor does not take"),
    ErrorCode.BAD_TENSORS: (InvalidItem, "has processed tensors that do not fit this model"),
    ErrorCode.TENSOR_MISSING: (InvalidItem, "lacks the processed tensor {fault.name}"),
    ErrorCode.TENSOR_TYPE: (InvalidItem, "has {fault.name} of a type that is not {kind}"),
    ErrorCode.TENSOR_DIMENSIONS: (
        InvalidItem,
        "has {fault.name} of {fault.found} dimensions; the model takes {limit}",
    ),
    ErrorCode.TENSOR_SIZE: (
        InvalidItem,
        "has {fault.name} of size {fault.found} on axis {fault.axis}; the model takes {limit}",
    ),
    ErrorCode.TENSOR_MULTIPLE: (
        InvalidItem,
        "has {fault.found} in {fault.name} on axis {fault.axis}; the model takes multiples of {limit}",
    ),
    ErrorCode.TENSOR_VALUE: (InvalidItem, "has {fault.found} in {fault.name}; the limit is {limit}"),
    ErrorCode.TENSOR_NOT_FINITE: (InvalidItem, "has numbers in {fault.name} that are not finite"),
    ErrorCode.KIND_UNSUPPORTED: (InvalidItem, "comes in a form that this model's family does not take"),
    ErrorCode.TOO_SHORT: (ItemUndecodable, "has {value} samples; the model needs at least {limit}"),
    ErrorCode.MODALITY_UNSUPPORTED: (ModalityNotServed, "has a modality not served by this checkpoint"),
    ErrorCode.TOO_LARGE_FOR_SEGMENT: (
        ItemTooLarge,
        "needs {value} bytes of embeddings; a segment holds {limit}",
    ),
    ErrorCode.NOT_A_VIDEO: (ItemUndecodable, "is not a video"),
    ErrorCode.NO_VIDEO_STREAM: (ItemUndecodable, "has no video stream"),
    ErrorCode.TOO_FEW_FRAMES: (ItemUndecodable, "has {value} usable frames, which is too few"),
    ErrorCode.TOO_MANY_FRAMES: (ItemUndecodable, "needs {value} frames; the limit is {limit}"),
    ErrorCode.FRAME_SIZES_DIFFER: (ItemUndecodable, "has frames of different sizes"),
    ErrorCode.NOT_AUDIO: (ItemUndecodable, "is not audio"),
    ErrorCode.NO_AUDIO_STREAM: (ItemUndecodable, "has no audio stream"),
    ErrorCode.NOT_FINITE: (ItemUndecodable, "has audio samples that are not finite numbers"),
    ErrorCode.TOO_LONG: (ItemUndecodable, "lasts {value} seconds; the limit is {limit}"),
}
_WORKER_STATES: Final[dict[ErrorCode, tuple[type[RequestError], str]]] = {
    ErrorCode.SEGMENT_FULL: (MemoryFull, "the worker's segment is full; release handles or come again"),
    ErrorCode.OUT_OF_DEVICE_MEMORY: (OutOfDeviceMemory, "the device has no memory for this request"),
    ErrorCode.FORWARD_FAILED: (EncodeFault, "the forward failed"),
    ErrorCode.DEADLINE: (DeadlinePassed, "the deadline passed before the encode was done"),
    ErrorCode.CANCELLED: (RequestCancelled, "the request was cancelled"),
    ErrorCode.WORKER_LOST: (WorkerLost, "the worker died before the encode was done"),
}


def from_worker(code: int, item: int, value: int, limit: int) -> RequestError:
    """The error that a FAILED record stands for. An unknown code is an EncodeFault."""
    try:
        known = ErrorCode(code)
    except ValueError:
        known = ErrorCode.INTERNAL
    if known in _WORKER_ERRORS:
        error_class, text = _WORKER_ERRORS[known]
        what = text.format(
            value=value,
            limit=limit,
            fault=TensorFault.unpack(value),
            kind="integer" if limit else "float32, float16 or bfloat16",
        )
        return error_class(f"mm_items[{item}] {what}", item_index=item)
    error_class, text = _WORKER_STATES.get(known, (EncodeFault, "the encode failed"))
    return error_class(text, retry_after_s=1.0 if CAUSES[error_class].status == 503 else None)
