"""What the HTTP half hands to the engine, and what it gets back.

`app.encode` and `app.session_request` build an EncodeJob for each admitted request; `app.engine` answers with
an Encoded or raises one of `app.errors`, or tells a listener. Nothing here has behaviour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shm.arena import InputBlock
    from shm.layout import Dtype
    from shm.messages import BlockMetadata, Handle

Wait = Literal["ready", "shape"]
State = Literal["ready", "shape"]


class EncodeJob(NamedTuple):
    """One request's media, packed and ready to be encoded.

    block holds [msgpack RequestMetadata, padded to a page][item bytes ...]; metadata_bytes is the length of
    the msgpack alone. deadline_ns is on CLOCK_MONOTONIC. digest: `app.ingest.content_digest` of the items.
    The engine owns block from the call on: it frees it when the ticket ends, whatever the outcome.
    """

    req_key: str
    modality: str
    block: InputBlock
    metadata_bytes: int
    item_count: int
    deadline_ns: int
    wait: Wait
    digest: bytes


class Timings(NamedTuple):
    """The worker's own clock readings for this request, microseconds; batch_items is a count."""

    queue_us: int = 0
    preprocess_us: int = 0
    forward_us: int = 0
    copy_us: int = 0
    batch_items: int = 0


class Encoded(NamedTuple):
    """A block that is READY (or, for wait "shape", FILLING) and a handle that can attach to it.

    rows x dim of dtype, nbytes in all. worker is the place that has it, attempt counts from 1.
    """

    handle: Handle
    metadata: BlockMetadata
    rows: int
    dim: int
    nbytes: int
    dtype: Dtype
    state: State
    timings: Timings
    worker: int
    attempt: int
