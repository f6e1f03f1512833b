"""The C extension: whole operations on shared memory, each with its memory order inside.

Buffers are anything with the buffer protocol (mmap, memoryview). Every offset is in bytes and is
checked against the buffer; a bad one is ValueError. All words are little-endian and naturally aligned.
A ring has two sides, which may lie in different regions (layout.h):

    producer side:  tail u64 at +0, slots at +128 (slot_count x 128 bytes)      written by the producer
    consumer side:  head u64 at +0, armed u32 at +128                            written by the consumer
                    (armed is also exchanged by a producer that may write there:
                    to 0 when it rings for a message, to 2 by Producer.ring)

BufferError where a buffer must be writable and is not.
"""

from typing import Final, TypeVar

from typing_extensions import Buffer

CACHE_LINE_BYTES: Final = 128
SLOT_BYTES: Final = 128
PRODUCER_SIDE_OVERHEAD_BYTES: Final = 128
CONSUMER_SIDE_BYTES: Final = 256
BLOCK_HEADER_BYTES: Final = 64
BLOCK_STATE_FREE: Final = 0

BufferPiece = TypeVar("BufferPiece", bound=Buffer)

class Producer:
    """The publishing end of a ring. One per ring, one thread at a time."""

    def __init__(
        self,
        producer_side: Buffer,
        producer_offset: int,
        consumer_side: Buffer,
        consumer_offset: int,
        slot_count: int,
        eventfd: int = -1,
    ) -> None:
        """slot_count: a power of two. eventfd: descriptor of the consumer's bell, -1 for a futex bell.

        If consumer_side is a read-only buffer, armed is only loaded (the consumer disarms itself);
        that needs an eventfd bell. The producer resumes at the tail it finds (its own word).
        """

    def try_publish(self, descriptor: Buffer, /) -> bool:
        """Copy up to 128 bytes (zero padded) into the next slot, release tail, ring if armed.

        False when the ring is full. RegionCorrupt when the peer's head is impossible. OSError when the
        eventfd cannot be written (the message is published all the same).
        """

    def try_publish_many(self, descriptors: Buffer, /) -> int:
        """Whole 128-byte descriptors, one behind the other: as many as there is room for, with one release of
        tail and one ring. How many that were. Errors as of try_publish; ValueError for another length."""

    def ring(self) -> None:
        """Wake the consumer without publishing (used after proof of death or to stop a thread).

        Sticky: a futex consumer that is awake has its next arm refused (its next idle take returns None);
        an eventfd becomes readable.
        """

    def free_slots(self) -> int:
        """Free slots right now. RegionCorrupt when the peer's head is impossible."""

    @property
    def published(self) -> int:
        """The ring's tail: messages ever published."""

    def close(self) -> None:
        """Give both buffers back, so that their mmap can close. Idempotent; other use is ValueError then."""

class Consumer:
    """The taking end of a ring. One per ring, one thread at a time."""

    def __init__(
        self,
        producer_side: Buffer,
        producer_offset: int,
        consumer_side: Buffer,
        consumer_offset: int,
        slot_count: int,
    ) -> None: ...
    def try_take(self) -> bytes | None:
        """Copy of the next slot (always 128 bytes), or None. RegionCorrupt if tail is impossible."""

    def arm(self) -> bool:
        """Arm, fence, re-check: True when armed and empty (safe to sleep). False, disarmed, when there is
        a message, or the ring was rung or woken without one: try_take, then arm again."""

    def disarm(self) -> None:
        """Awake again: the producer need not ring. A take() does this itself."""

    def take(self, timeout_ns: int, spin_ns: int = 0) -> bytes | None:
        """try_take; else spin up to spin_ns, then arm and sleep on the futex. None at the timeout (<= 0: at
        once) or when woken by Producer.ring or wake() without a message. The GIL is released; signals are
        handled (may raise). Meanwhile only wake, pending and taken may be used by other threads: anything
        else is RuntimeError."""

    def take_many(self, max_count: int, timeout_ns: int, spin_ns: int = 0) -> bytes:
        """As take, but all messages that are there, up to max_count (>= 1): their 128-byte slots one behind
        the other, given back together. Empty where take returns None."""

    def wake(self) -> None:
        """From another thread of this process: the take() under way, or the next idle one, returns None."""

    def pending(self) -> int:
        """Messages to take right now. RegionCorrupt when the peer's tail is impossible."""

    @property
    def taken(self) -> int:
        """The ring's head: messages ever taken."""

    def close(self) -> None:
        """Give both buffers back, so that their mmap can close. Idempotent; other use is ValueError then.
        RuntimeError while another thread is in take()."""

def header_load(segment: Buffer, offset: int) -> bytes:
    """A consistent copy of a block header's 64 bytes: state, generation and change_seq were the same after
    the copy as before. When the state is FREE the other fields mean nothing (the block may be being filled).
    RegionCorrupt if the header never holds still."""

def header_store(segment: Buffer, offset: int, header: Buffer) -> None:
    """Fill a header: FREE first, so that no reader believes a half-written body; then the body, generation
    next, state last by release; bumps change_seq twice, wakes waiters.

    change_seq in `header` is ignored. Called by the segment's one writer only.
    """

def header_store_state(segment: Buffer, offset: int, state: int) -> None:
    """Release-store the state, bump change_seq, wake every waiter."""

def header_store_rows_ready(segment: Buffer, offset: int, rows_ready: int) -> None:
    """Release-store rows_ready, bump change_seq, wake every waiter."""

def header_finish(segment: Buffer, offset: int, rows_ready: int, state: int) -> None:
    """Release-store rows_ready, then the state, bump change_seq once, wake every waiter."""

def header_wait(segment: Buffer, offset: int, seen_change_seq: int, timeout_ns: int) -> bool:
    """Futex-wait (works on a read-only mapping) until change_seq differs from seen. False at the timeout."""

def word_load(region: Buffer, offset: int) -> int:
    """Acquire-load of an aligned u64 (worker status words, region version)."""

def word_store(region: Buffer, offset: int, value: int) -> None:
    """Release-store of an aligned u64 by its one writer."""

def base64_decode_into(source: Buffer | str, target: Buffer, target_offset: int) -> int:
    """Strict RFC 4648 base64 (padding optional, CR/LF/blank skipped), without the GIL, straight into
    target. Bytes written. ValueError for a bad character, bad length or too small a target (message
    names the position, never content; target then holds what was decoded so far). `str` must be ASCII."""

def base64_decoded_bytes(source: Buffer | str, /) -> int:
    """Upper bound of what base64_decode_into writes, from the length alone (no scan)."""

def find_long_strings(text: Buffer, min_bytes: int, /) -> list[tuple[int, int]]:
    """Where the strings of a JSON text are that have at least min_bytes, all printable ASCII and no escape:
    (start, end) of their content, in order, found without the GIL. Any text will do; what is not JSON has
    other strings."""

def keyed_digest(key: Buffer, pieces: list[BufferPiece], /) -> bytes:
    """SipHash-1-3 of all pieces as one text: 16 bytes, without the GIL where a piece is long. key: 16 bytes,
    else ValueError. Whoever knows the key can make two texts of one digest; for anybody else two texts are
    the same by chance alone: 2**64 of them for even odds. Pieces must not change meanwhile."""

def set_parent_death_signal(signal: int, /) -> None:
    """prctl(PR_SET_PDEATHSIG). The caller checks getppid() afterwards."""
