"""Variable-size messages: msgpack runs in input blocks and blocks, and the attach socket's datagrams.

Both sides' formats live here: app and gpu_workers exchange RequestMetadata, BlockMetadata, WorkerConfig
and WorkerInfo; the client and app.sessions exchange the attach datagrams. Decoding validates types
(msgspec); ranges are the reader's to check.
"""

from typing import Any, Final, Literal

import msgspec

EXIT_CONFIG: Final = 78  # sysexits.h: a restart will end the same way; systemd/encoderd.service names it

ItemKind = Literal["media", "frames", "chunk", "processed"]
PARTED_KINDS: Final = ("frames", "chunk")  # of several files


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One file of an item of several, relative to the block's start."""

    offset: int
    nbytes: int


class ItemSource(msgspec.Struct, frozen=True, array_like=True):
    """One item's bytes inside the input block, relative to the block's start, and what they are.

    kind "media": one encoded file. "frames": several encoded pictures, `parts`, that are one item together
    (a video's frames, or the pictures of one item); offset and nbytes span them. "chunk": likewise, the
    frames of a short video in a request for pictures. "processed": a safetensors file with what the model's
    processor gives (pixel values, grids ...). options: the item's own processor options, as they came; values
    are what JSON has.
    """

    offset: int
    nbytes: int
    kind: ItemKind = "media"
    parts: list[Part] = []
    options: dict[str, Any] = {}


class RequestMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Head of an input block: what to encode. modality is lower case: image, video, audio."""

    modality: str
    items: list[ItemSource]


class ItemAux(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the language model needs beside an item's rows; None where the modality or family has none."""

    video_timestamps: list[float] | None = None  # seconds, one for each temporal patch
    second_per_grid_ts: float | None = None  # seconds from one temporal patch to the next
    audio_feature_length: int | None = None  # mel frames that went into the tower, padding not counted
    # Of a video with sound, whose last sum(segment_lens) rows are its sound and the others its frames:
    video_audio_segment_lens: list[int] | None = None  # rows of sound, for each temporal patch in turn
    video_audio_feature_length: int | None = None  # rows of the whole track, before it was cut to the patches


class ItemRows(msgspec.Struct, frozen=True, array_like=True):
    """One item's rows in the block, in request order.

    grids: [[t, h, w], ...] in patches, more than one where the item is several pictures or tiles; [[n]] mel
    frames for audio. width, height: pixels of the upright picture or frame, 0 for audio.
    """

    row_start: int
    row_count: int
    grids: list[list[int]]
    width: int
    height: int
    aux: ItemAux = ItemAux()


class BlockMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Head of a block's run: whose rows are where. Written before SHAPE_KNOWN."""

    modality: str
    items: list[ItemRows]


class MediaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """--mm-process-config: the processor's options for each modality, over those of the checkpoint."""

    image: dict[str, Any] = {}
    video: dict[str, Any] = {}
    audio: dict[str, Any] = {}


class WorkerConfig(msgspec.Struct, frozen=True):
    """All that a worker is told, as JSON in its argv. File descriptors are inherited numbers."""

    index: int
    epoch: int
    parent_pid: int
    checkpoint: str
    tower: str  # "auto": by the checkpoint's model_type; "stub": the test tower, no torch
    device: str  # "cpu", "cuda:0", ...
    dtype: str  # "auto" (the checkpoint's), "float32", "float16", "bfloat16"
    link_fd: int
    arena_fd: int
    segment_fd: int
    completion_eventfd: int
    max_batch_items: int
    max_batch_patches: int
    preprocess_threads: int
    torch_threads: int
    max_pixels: int
    max_aspect_ratio: int
    rgba_background: str  # "white", "black", "drop"
    trust_remote_code: bool
    log_level: str
    media_options: MediaOptions = MediaOptions()
    # Where pictures become pixel values. "device": the worker's own, whatever it is; "auto": there if it is
    # CUDA and the family is a Qwen.
    preprocess_device: Literal["auto", "cpu", "device"] = "auto"
    max_batch_wait_us: int = 0  # how long an idle device waits for more items to prepare
    # A tensor-parallel group: rank 0 alone has the link; the others have -1 for its descriptors.
    rank: int = 0
    world_size: int = 1
    tp_mode: Literal["weights", "data"] = "weights"
    group_fd: int = -1  # the group region; -1 where world_size is 1
    store_fd: int = -1  # a memfd, where the ranks' collectives meet; "weights" only
    faults: list[str] = []  # named fault points, tests only


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a READY worker says of itself, once, in its link region."""

    model_type: str
    modalities: list[str]
    dim: int
    dtype: str
    device: str
    tower_bytes: int
    load_ms: int


# --- attach socket (SOCK_SEQPACKET, one msgpack struct per datagram, SCM_RIGHTS beside it) ---


class SegmentGrant(msgspec.Struct, frozen=True):
    """A segment whose read-only descriptor comes with this datagram, in this order."""

    index: int
    epoch: int
    size_bytes: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """First datagram of a session. Descriptors: [client region rw, control region ro, bell eventfd,
    then one per segment]. http: where HTTP is served ("unix:/path" or "host:port"), for session.encode.
    input_bytes: the client region's input region; 0 where encodes come over HTTP only."""

    session: int
    layout_version: int
    boot_id: str
    http: str
    segments: list[SegmentGrant]
    input_bytes: int = 0


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Client -> control: turn the handle's nonce into a lease of this session."""

    nonce: str
    segment: int
    epoch: int
    block: int
    generation: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Control -> client: the lease. If `grant` is set, the segment's descriptor is beside it."""

    lease: int
    grant: SegmentGrant | None = None


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Control -> client, unasked: a lease in this segment follows on the completion ring. The segment's
    descriptor is beside it."""

    grant: SegmentGrant


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Control -> client. reason: "stale", "cap" or "protocol"."""

    reason: str


class SessionFault(msgspec.Struct, frozen=True, array_like=True):
    """Why an encode over a session failed, in the words that HTTP would have used."""

    code: str
    message: str


class Handle(msgspec.Struct, frozen=True):
    """What HTTP returns and attach takes: a right to block@generation for whoever knows the nonce.

    offset and nbytes describe the payload, dtype is float32, float16 or bfloat16. attach is the path
    of the daemon's attach socket.
    """

    boot_id: str
    segment: int
    epoch: int
    block: int
    generation: int
    offset: int
    nbytes: int
    rows: int
    dim: int
    dtype: str
    nonce: str
    attach: str = ""
