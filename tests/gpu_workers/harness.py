"""A real worker process and the part of control that a test plays: its regions, its rings, its log."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from shm.arena import InputArena, InputBlock, create_arena
from shm.group import create_group
from shm.layout import BlockHeader, Completion, CompletionKind, Submission, SubmissionKind
from shm.link import ControlLink, create_link
from shm.messages import BlockMetadata, ItemSource, RequestMetadata, WorkerConfig
from shm.region import Backing
from shm.segment import SegmentReader, create_segment

SLOT_COUNT = 256
_HANG_GUARD_SECONDS = 120
_SECOND_NS = 1_000_000_000


def worker_config(**changes: Any) -> WorkerConfig:
    """A stub worker's configuration, with changes. The descriptors are filled in by Harness."""
    values: dict[str, Any] = {
        "index": 3,
        "epoch": 1,
        "parent_pid": os.getpid(),
        "checkpoint": "",
        "tower": "stub",
        "device": "cpu",
        "dtype": "auto",
        "link_fd": -1,
        "arena_fd": -1,
        "segment_fd": -1,
        "completion_eventfd": -1,
        "max_batch_items": 8,
        "max_batch_patches": 16384,
        "preprocess_threads": 1,
        "torch_threads": 1,
        "max_pixels": 33_500_000,
        "max_aspect_ratio": 200,
        "rgba_background": "white",
        "trust_remote_code": False,
        "log_level": "info",
    }
    return WorkerConfig(**(values | changes))


class WorkerDied(Exception):
    """The worker ended while the test waited for a completion."""


@dataclass(frozen=True)
class Outcome:
    """How a ticket ended, and what was reported of it before."""

    shape_known: Completion | None
    end: Completion


class Harness:
    """One worker launch. Enter it to start the process and wait until it is READY or has ended."""

    def __init__(
        self,
        segment_bytes: int = 8 << 20,
        arena_bytes: int = 8 << 20,
        other_rank: dict[str, Any] | None = None,
        **config_changes: Any,
    ) -> None:
        """other_rank: what the second rank of a group of two is told otherwise; None: a single process."""
        self._changes = config_changes
        self._other_rank = other_rank
        self._segment_bytes = segment_bytes
        self._arena_bytes = arena_bytes
        self._undo = ExitStack()
        self._next_ticket = 1
        self._blocks: list[InputBlock] = []
        self._early: dict[int, list[Completion]] = {}
        self._ready = threading.Event()
        self.log: list[str] = []

    def __enter__(self) -> Self:
        boot_id = os.urandom(16)
        epoch = self._changes.get("epoch", 1)
        link = self._undo.enter_context(create_link(SLOT_COUNT, boot_id, 3, epoch, Backing.MEMFD))
        arena = self._undo.enter_context(
            create_arena(self._arena_bytes, boot_id=boot_id, backing=Backing.MEMFD)
        )
        segment = self._undo.enter_context(
            create_segment(self._segment_bytes, boot_id=boot_id, place=3, epoch=epoch, backing=Backing.MEMFD)
        )
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._undo.callback(os.close, bell)
        self.control = ControlLink(link, bell)
        self.arena = InputArena(arena)
        self.segment = SegmentReader(segment)
        config = worker_config(
            link_fd=link.fd,
            arena_fd=arena.fd,
            segment_fd=segment.fd,
            completion_eventfd=bell,
            **self._changes,
        )
        if self._other_rank is not None:
            config = self._start_other_rank(config, boot_id)
        self.process = _spawn(config, stderr=subprocess.PIPE)
        self._undo.callback(self._end_process)
        self._death = os.pidfd_open(self.process.pid)
        self._undo.callback(os.close, self._death)
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        assert self._ready.wait(_HANG_GUARD_SECONDS), "the worker neither got ready nor ended"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start_other_rank(self, config: WorkerConfig, boot_id: bytes) -> WorkerConfig:
        """As control would, but that nobody kills one rank when the other dies. Rank 0's configuration."""
        group = self._undo.enter_context(
            create_group(2, boot_id=boot_id, place=3, epoch=config.epoch, backing=Backing.MEMFD)
        )
        store_fd = os.memfd_create("store")
        self._undo.callback(os.close, store_fd)
        config = msgspec.structs.replace(config, world_size=2, group_fd=group.fd, store_fd=store_fd)
        other = msgspec.structs.replace(
            config, rank=1, link_fd=-1, completion_eventfd=-1, **(self._other_rank or {})
        )
        self.other_process = _spawn(other, stderr=None)
        self._undo.callback(self.other_process.wait)
        self._undo.callback(self.other_process.kill)
        return config

    # --- what control says ---

    def submit(
        self,
        *items: bytes,
        modality: str = "image",
        deadline_seconds: float = _HANG_GUARD_SECONDS,
        streamed: bool = False,
    ) -> int:
        """Publish an ENCODE of these items. Its ticket. streamed: somebody waits for its shape."""
        sources: list[ItemSource] = []
        offset = 64 + 16 * len(items)
        for item in items:
            sources.append(ItemSource(offset, len(item)))
            offset += len(item)
        metadata = msgspec.msgpack.encode(RequestMetadata(modality, sources))
        return self.submit_raw(
            metadata,
            list(zip(sources, items, strict=True)),
            nbytes=offset,
            item_count=len(items),
            deadline_seconds=deadline_seconds,
            streamed=streamed,
        )

    def submit_raw(
        self,
        metadata: bytes,
        contents: list[tuple[ItemSource, bytes]],
        *,
        nbytes: int,
        item_count: int,
        deadline_seconds: float = _HANG_GUARD_SECONDS,
        streamed: bool = False,
    ) -> int:
        """Publish an ENCODE whose metadata may be anything."""
        block = self.arena.allocate(nbytes)
        assert block is not None, "the test's arena is full"
        self._blocks.append(block)
        block.view[: len(metadata)] = metadata
        for source, item in contents:
            block.view[source.offset : source.offset + source.nbytes] = item
        ticket = self._next_ticket
        self._next_ticket += 1
        self.say(
            Submission(
                SubmissionKind.ENCODE,
                ticket=ticket,
                deadline_ns=time.monotonic_ns() + int(deadline_seconds * _SECOND_NS),
                arena_offset=block.offset,
                arena_nbytes=block.nbytes,
                metadata_bytes=len(metadata),
                item_count=item_count,
                streamed=streamed,
            )
        )
        return ticket

    def cancel(self, ticket: int) -> None:
        """Publish a CANCEL."""
        self.say(Submission(SubmissionKind.CANCEL, ticket=ticket))

    def reclaim(self, completion: Completion) -> None:
        """Publish a RECLAIM of the completion's block."""
        self.say(Submission(SubmissionKind.RECLAIM, block=completion.block, generation=completion.generation))

    def say(self, submission: Submission) -> None:
        """Publish any descriptor."""
        assert self.control.submissions.try_publish(submission.pack()), "the submission ring is full"

    # --- what the worker answers ---

    def shape_of(self, ticket: int) -> Completion:
        """The ticket's SHAPE_KNOWN record; waits for it."""
        return self._wait_for(ticket, CompletionKind.SHAPE_KNOWN)[0]

    def outcome_of(self, ticket: int) -> Outcome:
        """How the ticket ended; waits for it."""
        records = self._wait_for(ticket, CompletionKind.READY, CompletionKind.FAILED)
        return Outcome(records[0] if len(records) > 1 else None, records[-1])

    def outcome(self, *items: bytes, **options: Any) -> Outcome:
        """Submit and wait for the end."""
        return self.outcome_of(self.submit(*items, **options))

    def header(self, completion: Completion) -> BlockHeader:
        """The block's header as it is now."""
        return self.segment.header(completion.block)

    def metadata(self, completion: Completion) -> BlockMetadata:
        """The block's metadata run."""
        run = self.segment.metadata(self.header(completion))
        return msgspec.msgpack.decode(run, type=BlockMetadata)

    def rows(self, completion: Completion) -> npt.NDArray[np.float32]:
        """A copy of all float32 rows of the block."""
        payload = self.segment.payload(self.header(completion))
        return np.frombuffer(payload, np.float32).reshape(completion.rows, completion.dim).copy()

    def wait_header(self, completion: Completion, rows_ready: int) -> BlockHeader:
        """The header once this many rows are ready; sleeps on the block's own word."""
        while (header := self.header(completion)).rows_ready < rows_ready:
            changed = self.segment.wait_change(
                completion.block, header.change_seq, _HANG_GUARD_SECONDS * _SECOND_NS
            )
            assert changed, "the rows never came"
        return header

    def wait_exit(self) -> int:
        """The exit status (negative: the signal), once the process has ended and its log is read."""
        status = self.process.wait(_HANG_GUARD_SECONDS)
        self._reader.join()
        return status

    def _wait_for(self, ticket: int, *kinds: CompletionKind) -> list[Completion]:
        """All records of the ticket so far, the last being of one of these kinds."""
        while True:
            records = self._early.setdefault(ticket, [])
            if records and records[-1].kind in kinds:
                return records
            record = self._next_record()
            self._early.setdefault(record.ticket, []).append(record)

    def _next_record(self) -> Completion:
        bell, death = self.control.eventfd, self._death
        while True:
            raw = self.control.completions.try_take()
            if raw is not None:
                return Completion.unpack(raw)
            if not self.control.completions.arm():
                continue
            ready, _, _ = select.select([bell, death], [], [], _HANG_GUARD_SECONDS)
            assert ready, "no completion came"
            if bell in ready:
                os.eventfd_read(bell)
            elif (raw := self.control.completions.try_take()) is not None:
                return Completion.unpack(raw)
            else:
                raise WorkerDied

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if ": ready model_type=" in line:
                self._ready.set()
        self._ready.set()

    def _end_process(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def _spawn(config: WorkerConfig, stderr: int | None) -> "subprocess.Popen[str]":
    named = (config.link_fd, config.arena_fd, config.segment_fd, config.completion_eventfd, config.group_fd,
             config.store_fd)  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_workers", msgspec.json.encode(config).decode()],
        pass_fds=[fd for fd in named if fd >= 0],
        stderr=stderr,
        text=True,
    )
