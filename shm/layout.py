"""The bytes of every region, once: constants and struct formats. Mirrors csrc/layout.h (a test compares).

Read by everything in shm, by app and by gpu_workers. Nothing here touches memory.

Region header, 128 bytes, written by the region's creator before anyone else maps it, `version` last:

    0 magic u64 | 8 version u64 | 16 size_bytes u64 | 24 boot_id 16 bytes | 40 kind u32 | 44 place u32
    48 epoch u32 | 52 capacity u32 (slots or blocks) | 56 payload_offset u64 | 64..127 zero
"""

import struct
from collections.abc import Iterator
from enum import IntEnum, unique
from typing import Final, NamedTuple, Self

from shm.errors import RegionCorrupt

MAGIC: Final = int.from_bytes(b"ENCODRD1", "little")
LAYOUT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 128
SLOT_BYTES: Final = 128
BLOCK_HEADER_BYTES: Final = 64
REGION_HEADER_BYTES: Final = 128
VERSION_OFFSET: Final = 8

# Sides of a ring: see _core.pyi.
CONSUMER_SIDE_BYTES: Final = 256


def producer_side_bytes(slot_count: int) -> int:
    """Bytes of a ring's producer side: the tail line and the slots."""
    return LINE_BYTES + slot_count * SLOT_BYTES


def page_align(nbytes: int) -> int:
    """nbytes rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@unique
class RegionKind(IntEnum):
    """What a region holds."""

    LINK = 1
    ARENA = 2
    SEGMENT = 3
    SESSION_CLIENT = 4
    SESSION_CONTROL = 5
    GROUP = 6


_REGION_HEADER: Final = struct.Struct("<QQQ16sIIIIQ64x")


class RegionHeader(NamedTuple):
    """The first 128 bytes of a region. Written by its creator, version last."""

    kind: RegionKind
    place: int
    epoch: int
    size_bytes: int
    capacity: int
    payload_offset: int
    boot_id: bytes

    def pack(self) -> bytes:
        """128 bytes with version 0: the creator stores the version by release afterwards."""
        return _REGION_HEADER.pack(
            MAGIC, 0, self.size_bytes, self.boot_id, self.kind, self.place, self.epoch,
            self.capacity, self.payload_offset,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse and check; RegionCorrupt if this is not a finished region of our layout."""
        magic, version, size, boot_id, kind, place, epoch, capacity, payload = _REGION_HEADER.unpack(raw)
        if magic != MAGIC or version != LAYOUT_VERSION:
            raise RegionCorrupt("not an encoderd region of this layout version")
        try:
            return cls(RegionKind(kind), place, epoch, size, capacity, payload, boot_id)
        except ValueError:
            raise RegionCorrupt(f"unknown region kind {kind}") from None


assert _REGION_HEADER.size == REGION_HEADER_BYTES

# --- LINK region: one per worker launch. Control creates it; the worker inherits the descriptor. ---
# worker status line: written by the worker.
LINK_STATE_OFFSET: Final = 128  # u64 WorkerState
LINK_HEARTBEAT_OFFSET: Final = 136  # u64 CLOCK_MONOTONIC ns, at least once a second
LINK_OLDEST_STEP_OFFSET: Final = 144  # u64 ns when the oldest decode/forward under way began, 0 idle
LINK_INFO_BYTES_OFFSET: Final = 160  # u64 length of the info run, stored before state READY/FAILED
LINK_INFO_OFFSET: Final = 4096  # msgpack WorkerInfo (READY) or UTF-8 reason (FAILED)
LINK_INFO_CAPACITY_BYTES: Final = 4096
LINK_SUBMISSION_OFFSET: Final = 8192  # consumer side (worker), then producer side (control)


def link_submission_offsets() -> tuple[int, int]:
    """(producer side, consumer side) of the submission ring. Control produces, the worker consumes."""
    return LINK_SUBMISSION_OFFSET + CONSUMER_SIDE_BYTES, LINK_SUBMISSION_OFFSET


def link_completion_offsets(slot_count: int) -> tuple[int, int]:
    """(producer side, consumer side) of the completion ring. The worker produces, control consumes."""
    base = LINK_SUBMISSION_OFFSET + CONSUMER_SIDE_BYTES + producer_side_bytes(slot_count)
    return base + CONSUMER_SIDE_BYTES, base


def link_bytes(slot_count: int) -> int:
    """Size of a link region whose two rings have slot_count slots each."""
    return page_align(LINK_SUBMISSION_OFFSET + 2 * (CONSUMER_SIDE_BYTES + producer_side_bytes(slot_count)))


@unique
class WorkerState(IntEnum):
    """The worker's own word about itself, in its link's status line."""

    STARTING = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4


# --- SESSION regions: the client writes one memfd, control the other (read-only at the client). ---
# Both begin with a region header. The client's: submission ring (producer side), completion ring (consumer
# side), input region. Control's: submission ring (consumer side), completion ring (producer side), faults.
SESSION_SIDE_OFFSET: Final = 128  # the submission ring's side begins right after the region header
SESSION_SLOT_COUNT: Final = 1024  # of the submission ring
SESSION_REQUEST_SLOTS: Final = 256  # requests under way at once; slots of the completion ring
SESSION_COMPLETION_CONSUMER_OFFSET: Final = SESSION_SIDE_OFFSET + producer_side_bytes(SESSION_SLOT_COUNT)
SESSION_INPUT_OFFSET: Final = page_align(SESSION_COMPLETION_CONSUMER_OFFSET + CONSUMER_SIDE_BYTES)
SESSION_COMPLETION_PRODUCER_OFFSET: Final = SESSION_SIDE_OFFSET + CONSUMER_SIDE_BYTES
# One run of SESSION_FAULT_BYTES for each request slot: msgpack SessionFault.
SESSION_FAULT_OFFSET: Final = page_align(
    SESSION_COMPLETION_PRODUCER_OFFSET + producer_side_bytes(SESSION_REQUEST_SLOTS)
)
SESSION_FAULT_BYTES: Final = 512
SESSION_CONTROL_BYTES: Final = page_align(SESSION_FAULT_OFFSET + SESSION_REQUEST_SLOTS * SESSION_FAULT_BYTES)


def session_client_bytes(input_bytes: int) -> int:
    """Size of a session's client region whose input region has input_bytes."""
    return SESSION_INPUT_OFFSET + page_align(input_bytes)


def session_fault_offset(request: int) -> int:
    """Where control leaves the words for a failed request of this number."""
    return SESSION_FAULT_OFFSET + request % SESSION_REQUEST_SLOTS * SESSION_FAULT_BYTES


# --- SEGMENT region ---
BLOCK_TABLE_OFFSET: Final = 4096


def block_header_offset(block: int) -> int:
    """Where block's 64-byte header lies in its segment."""
    return BLOCK_TABLE_OFFSET + block * BLOCK_HEADER_BYTES


@unique
class BlockState(IntEnum):
    """FREE -> FILLING -> READY or FAILED -> RETIRED -> FREE; or FILLING -> LOST, which is final.

    Only control stores LOST, after proof of the worker's death: the encode did not fail, its worker did,
    so a reader gets WorkerLost (ask again) and not EncodeFailed. The segment has no writer any more.
    """

    FREE = 0
    FILLING = 1
    READY = 2
    FAILED = 3
    RETIRED = 4
    LOST = 5


@unique
class Dtype(IntEnum):
    """Element types of a payload. The names are torch's and safetensors'."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2

    @property
    def label(self) -> str:
        """The name in JSON and on the command line: float32, float16, bfloat16."""
        return self.name.lower()


_BLOCK_HEADER: Final = struct.Struct("<IIQQQIIIIIIQ")


class BlockHeader(NamedTuple):
    """A block's 64 bytes. One writer: the segment's worker; control after proof of its death.

    0 state u32 | 4 change_seq u32 (futex word) | 8 generation u64 | 16 offset u64 | 24 nbytes u64
    32 rows u32 | 36 dim u32 | 40 rows_ready u32 | 44 dtype u32 | 48 epoch u32 | 52 metadata_bytes u32
    56 run_bytes u64

    A block's run is [metadata, padded to a page][payload]. `offset` is the payload's (page-aligned,
    from the segment's start), `offset - page_align(metadata_bytes)` the run's; `run_bytes` covers both.
    """

    state: int
    change_seq: int
    generation: int
    offset: int
    nbytes: int
    rows: int
    dim: int
    rows_ready: int
    dtype: int
    epoch: int
    metadata_bytes: int
    run_bytes: int

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _BLOCK_HEADER.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse without judging; the caller checks ranges (shared memory is input)."""
        return cls(*_BLOCK_HEADER.unpack(raw))


assert _BLOCK_HEADER.size == BLOCK_HEADER_BYTES


# --- descriptors (128-byte slots) ---
@unique
class SubmissionKind(IntEnum):
    """What control asks of a worker."""

    ENCODE = 1
    CANCEL = 2
    RECLAIM = 3
    DRAIN = 4


_SUBMISSION_KINDS: Final = {int(kind): kind for kind in SubmissionKind}
_SUBMISSION: Final = struct.Struct("<IIQQQQIIQI68x")


class Submission(NamedTuple):
    """Control -> worker. ticket: control's number of this attempt, unique per boot.

    ENCODE uses arena_offset, arena_nbytes (the whole input block), metadata_bytes (msgpack
    RequestMetadata at its head), deadline_ns, item_count, streamed (1: a reader waits for the first rows).
    CANCEL uses ticket. RECLAIM uses block, generation.
    """

    kind: SubmissionKind
    ticket: int = 0
    deadline_ns: int = 0
    arena_offset: int = 0
    arena_nbytes: int = 0
    metadata_bytes: int = 0
    item_count: int = 0
    block: int = 0
    generation: int = 0
    streamed: int = 0

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _SUBMISSION.pack(
            self.kind, self.block, self.ticket, self.deadline_ns, self.arena_offset,
            self.arena_nbytes, self.metadata_bytes, self.item_count, self.generation, self.streamed,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse a slot; RegionCorrupt for an unknown kind."""
        return next(cls.unpack_many(raw))

    @classmethod
    def unpack_many(cls, slots: bytes) -> Iterator[Self]:
        """Parse slots one behind the other; RegionCorrupt at the first of an unknown kind."""
        for fields in _SUBMISSION.iter_unpack(slots):
            kind, block, ticket, deadline, offset, nbytes, meta, items, generation, streamed = fields
            known = _SUBMISSION_KINDS.get(kind)
            if known is None:
                raise RegionCorrupt(f"unknown submission kind {kind}")
            yield cls(known, ticket, deadline, offset, nbytes, meta, items, block, generation, streamed)


assert _SUBMISSION.size == SLOT_BYTES


@unique
class CompletionKind(IntEnum):
    """What a worker reports."""

    SHAPE_KNOWN = 1
    READY = 2
    FAILED = 3


_COMPLETION_KINDS: Final = {int(kind): kind for kind in CompletionKind}
_COMPLETION: Final = struct.Struct("<IIQQQQIIIIIIQQIIIII28x")


class Completion(NamedTuple):
    """Worker -> control. SHAPE_KNOWN once a block is FILLING; then READY or FAILED ends the ticket.

    SHAPE_KNOWN is left out where the end comes soon, unless the submission was streamed: READY repeats it.

    A FAILED whose block field is NO_BLOCK never had one. A FAILED with a block: the block is in state
    FAILED and control reclaims it. Durations are microseconds, clamped to u32.
    """

    kind: CompletionKind
    ticket: int
    block: int = 0
    generation: int = 0
    offset: int = 0
    nbytes: int = 0
    rows: int = 0
    dim: int = 0
    dtype: int = 0
    metadata_bytes: int = 0
    error: int = 0
    error_item: int = 0
    error_value: int = 0
    error_limit: int = 0
    queue_us: int = 0
    preprocess_us: int = 0
    forward_us: int = 0
    copy_us: int = 0
    batch_items: int = 0

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _COMPLETION.pack(
            self.kind, self.block, self.ticket, self.generation, self.offset, self.nbytes,
            self.rows, self.dim, self.dtype, self.metadata_bytes, self.error, self.error_item,
            self.error_value, self.error_limit, self.queue_us, self.preprocess_us,
            self.forward_us, self.copy_us, self.batch_items,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse a slot; RegionCorrupt for an unknown kind."""
        return next(cls.unpack_many(raw))

    @classmethod
    def unpack_many(cls, slots: bytes) -> Iterator[Self]:
        """Parse slots one behind the other; RegionCorrupt at the first of an unknown kind."""
        for kind, block, ticket, *rest in _COMPLETION.iter_unpack(slots):
            known = _COMPLETION_KINDS.get(kind)
            if known is None:
                raise RegionCorrupt(f"unknown completion kind {kind}")
            yield cls(known, ticket, block, *rest)


NO_BLOCK: Final = 0xFFFFFFFF
assert _COMPLETION.size == SLOT_BYTES


@unique
class SessionKind(IntEnum):
    """What a session's client says through its submission ring."""

    RELEASE = 1
    ENCODE = 2
    CANCEL = 3


@unique
class SessionWait(IntEnum):
    """When an encode is answered: with all rows, or as soon as its sizes are known."""

    READY = 0
    SHAPE = 1


_SESSION_DESCRIPTOR: Final = struct.Struct("<IIQQQQQII72x")


class SessionDescriptor(NamedTuple):
    """Client -> control, untrusted.

    RELEASE ends the lease with this number, if it is this session's. ENCODE: the run of nbytes at offset in
    the input region is [msgpack RequestMetadata, metadata_bytes][req_id in UTF-8, req_id_bytes][items], its
    ItemSources counted from the run's start; it stays as it is until the answer. request: the client's
    number; no two under way may be equal modulo SESSION_REQUEST_SLOTS. deadline_ns: CLOCK_MONOTONIC. CANCEL
    ends the request of this number with a FAILED, unless it has its answer already.
    """

    kind: int
    lease: int = 0
    request: int = 0
    offset: int = 0
    nbytes: int = 0
    deadline_ns: int = 0
    metadata_bytes: int = 0
    req_id_bytes: int = 0
    wait: int = SessionWait.READY

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _SESSION_DESCRIPTOR.pack(
            self.kind, self.wait, self.lease, self.request, self.offset, self.nbytes,
            self.deadline_ns, self.metadata_bytes, self.req_id_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse without judging: every field may be anything."""
        return next(cls.unpack_many(raw))

    @classmethod
    def unpack_many(cls, slots: bytes) -> Iterator[Self]:
        """Parse slots one behind the other, without judging."""
        for fields in _SESSION_DESCRIPTOR.iter_unpack(slots):
            kind, wait, lease, request, offset, nbytes, deadline_ns, metadata_bytes, req_id_bytes = fields
            yield cls(kind, lease, request, offset, nbytes, deadline_ns, metadata_bytes, req_id_bytes, wait)


assert _SESSION_DESCRIPTOR.size == SLOT_BYTES


@unique
class SessionAnswer(IntEnum):
    """How an encode that came over a session is answered."""

    SHAPE = 1
    READY = 2
    FAILED = 3


_SESSION_ANSWERS: Final = {int(kind): kind for kind in SessionAnswer}
_SESSION_COMPLETION: Final = struct.Struct("<IIQQQQQ9I44x")


class SessionCompletion(NamedTuple):
    """Control -> client: the one answer to the ENCODE of this number.

    SHAPE and READY: lease is this session's already; the rest describes the block as a Handle does. FAILED:
    status is HTTP's, retry_after_ms may be 0, and fault_bytes of msgpack SessionFault lie at
    session_fault_offset(request) until the client uses that request slot again.
    """

    kind: SessionAnswer
    request: int
    lease: int = 0
    generation: int = 0
    offset: int = 0
    nbytes: int = 0
    segment: int = 0
    epoch: int = 0
    block: int = 0
    rows: int = 0
    dim: int = 0
    dtype: int = 0
    metadata_bytes: int = 0
    status: int = 0
    retry_after_ms: int = 0
    fault_bytes: int = 0

    def pack(self) -> bytes:
        """The 128-byte slot."""
        return _SESSION_COMPLETION.pack(
            self.kind, self.status, self.request, self.lease, self.generation, self.offset, self.nbytes,
            self.segment, self.epoch, self.block, self.rows, self.dim, self.dtype, self.metadata_bytes,
            self.retry_after_ms, self.fault_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Parse a slot; RegionCorrupt for an unknown kind."""
        return next(cls.unpack_many(raw))

    @classmethod
    def unpack_many(cls, slots: bytes) -> Iterator[Self]:
        """Parse slots one behind the other; RegionCorrupt at the first of an unknown kind."""
        for (
            kind, status, request, lease, generation, offset, nbytes, segment, epoch, block, rows, dim, dtype,
            metadata_bytes, retry_after_ms, fault_bytes,
        ) in _SESSION_COMPLETION.iter_unpack(slots):  # fmt: skip
            known = _SESSION_ANSWERS.get(kind)
            if known is None:
                raise RegionCorrupt(f"unknown session answer {kind}")
            yield cls(
                known, request, lease, generation, offset, nbytes, segment, epoch, block, rows, dim, dtype,
                metadata_bytes, status, retry_after_ms, fault_bytes,
            )  # fmt: skip


assert _SESSION_COMPLETION.size == SLOT_BYTES
