"""Every job that has not ended, and what each of its items waits for.

The one meeting point of the worker's threads: intake adds jobs, preprocess threads and the device thread take
items and bring them back. Only the methods here change a job's state, under one lock, so that one place has
the rule that a ticket ends exactly once:

    a job ends (READY or FAILED) when it is finished or failed AND no thread holds an item of it.

So control may free the arena bytes and reclaim the block at once: nobody reads or writes them any more.

A job comes in with `open`. Items whose size no header tells are measured by the preprocess threads first;
when all sizes are known intake gives the job a block and lets its items go on with `admit`.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_workers.batching import next_batch
from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, Prepared
from gpu_workers.jobs import Item, ItemState, Job
from gpu_workers.publish import Publisher
from shm.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one forward may hold, how much may wait for it, and how long it may wait for more."""

    max_items: int
    max_patches: int
    max_wait_ns: int = 0  # 0: an idle device starts at once

    @property
    def max_prepared_patches(self) -> int:
        """Patches being prepared or waiting prepared: two batches, so that the device never waits."""
        return 2 * self.max_patches


class EncodeResult(NamedTuple):
    """What became of an item that the device took: its rows are in its block, or `error` says why not."""

    item: Item
    error: ItemError | None = None


class Backlog:
    """All jobs under way. Methods may be called from any thread unless they say otherwise."""

    def __init__(self, publisher: Publisher, limits: BatchLimits, wake_intake: Callable[[], None]) -> None:
        """wake_intake: called on a preprocess thread when take_measured has something."""
        self._publisher = publisher
        self._limits = limits
        self._wake_intake = wake_intake
        self._lock = threading.Lock()
        self._may_prepare = threading.Condition(self._lock)
        self._may_encode = threading.Condition(self._lock)
        self._jobs: dict[int, Job] = {}
        self._waiting: list[tuple[tuple[int, int, int], Item]] = []  # heap; failed jobs' items are skipped
        self._measured: deque[Job] = deque()
        self._prepared: list[Item] = []
        self._prepared_patches = 0  # of items HELD_FOR_PREPARE and PREPARED
        self._finishing = False

    # --- intake ---

    def open(self, job: Job) -> None:
        """Take over a job that has no block yet. Its unmeasured items are measured from now on."""
        with self._lock:
            self._jobs[job.ticket] = job
            self._push_waiting(item for item in job.items if item.state is ItemState.UNMEASURED)

    def take_measured(self) -> Job | None:
        """A job that was opened with items of unknown size, once all sizes are known; None: none now."""
        with self._lock:
            while self._measured:
                job = self._measured.popleft()
                if job.error is None:
                    return job
            return None

    def admit(self, job: Job) -> None:
        """Let the items of an open job go on: it has a block, and its SHAPE_KNOWN is published."""
        with self._lock:
            self._push_waiting(job.items)

    def fail(self, job: Job, error: ItemError, item_index: int = 0) -> None:
        """End an open job that cannot have a block."""
        with self._lock:
            self._fail(job, error, item_index)

    def cancel(self, ticket: int) -> None:
        """Fail the job if any item of it has not reached the device; a ticket that is not here has ended."""
        with self._lock:
            job = self._jobs.get(ticket)
            if job is not None and _is_before_forward(job):
                self._fail(job, ItemError(ErrorCode.CANCELLED))

    def drop_expired(self) -> None:
        """Fail every job whose deadline passed before its last forward."""
        with self._lock:
            now_ns = time.monotonic_ns()
            for job in [job for job in self._jobs.values() if job.deadline_ns <= now_ns]:
                if _is_before_forward(job):
                    self._fail(job, ItemError(ErrorCode.DEADLINE))

    def finish(self) -> None:
        """No job will be added any more: takers get None once the last one has ended."""
        with self._lock:
            self._finishing = True
            self._may_encode.notify_all()  # nobody waits for more
            self._wake_all_if_finished()

    # --- preprocess threads ---

    def take_to_prepare(self) -> Item | None:
        """The next item to measure (if its state was UNMEASURED: it has no plan) or to decode; waits for one.

        None: finished. It comes back by bring_measured or bring_prepared, or by drop_unprepared.
        """
        with self._lock:
            while True:
                item = self._first_waiting()
                if item is not None and self._may_hold_prepared(item):
                    break
                if self._finished():
                    return None
                self._may_prepare.wait()
            heapq.heappop(self._waiting)
            item.state = ItemState.HELD_FOR_PREPARE
            item.job.held_items += 1
            self._prepared_patches += item.cost_patches
            self._may_prepare.notify()  # perhaps the next one fits as well
            timings = item.job.timings
            if timings.queue_ns == 0:
                timings.queue_ns = time.monotonic_ns() - timings.taken_ns
            return item

    def bring_measured(self, item: Item, plan: ItemPlan, spent_ns: int) -> None:
        """The item's size is known; with the last one of its job intake hears of it."""
        with self._lock:
            job = item.job
            job.held_items -= 1
            job.timings.preprocess_ns += spent_ns
            if job.error is not None:
                self._end_if_free(job)
                return
            item.known_plan = plan
            item.state = ItemState.WAITING
            if job.is_measured:
                self._measured.append(job)
                self._wake_intake()

    def bring_prepared(self, item: Item, prepared: Prepared, spent_ns: int) -> None:
        """The item is decoded and waits for the device from now on (unless its job failed meanwhile)."""
        with self._lock:
            job = item.job
            job.held_items -= 1
            job.timings.preprocess_ns += spent_ns
            if job.error is not None:
                self._leave_prepared(item)
                self._end_if_free(job)
                return
            item.prepared = prepared
            item.state = ItemState.PREPARED
            item.prepared_ns = time.monotonic_ns()
            self._prepared.append(item)
            self._may_encode.notify()

    def drop_unprepared(self, item: Item, error: ItemError) -> None:
        """The item cannot be decoded: its job fails."""
        with self._lock:
            item.job.held_items -= 1
            self._leave_prepared(item)
            self._fail(item.job, error, item.index)

    # --- device thread and the deliverer behind it ---

    def take_batch(self) -> list[Item] | None:
        """What goes into the next forward; waits until something is prepared. None: finished."""
        with self._lock:
            while True:
                self._drop_expired_prepared()
                if self._prepared:
                    wait_ns = self._batch_wait_ns()
                    if wait_ns <= 0:
                        break
                    self._may_encode.wait(wait_ns / 1e9)
                    continue
                if self._finished():
                    return None
                self._may_encode.wait()
            batch = next_batch(self._prepared, self._limits.max_items, self._limits.max_patches)
            for item in batch:
                self._prepared.remove(item)
                self._leave_prepared(item)
                item.state = ItemState.HELD_FOR_ENCODE
                item.job.held_items += 1
                item.job.taken_items += 1
                item.job.timings.batch_items = max(item.job.timings.batch_items, len(batch))
            return batch  # each item comes back through bring_batch

    def bring_batch(self, results: Sequence[EncodeResult], forward_ns: int, copy_ns: int) -> None:
        """The batch's rows are in their blocks, or say why not. Calls of one thread only, in batch order."""
        with self._lock:
            for job in _jobs_of(result.item for result in results):
                job.timings.forward_ns += forward_ns
                job.timings.copy_ns += copy_ns
            for item, error in results:
                item.job.held_items -= 1
                item.state = ItemState.DONE
                item.prepared = None
                if error is not None:
                    self._fail(item.job, error, item.index)
            for job in _jobs_of(result.item for result in results):
                if job.error is None:
                    self._publish_prefix(job)
                self._end_if_free(job)

    # --- to look inside ---

    def statistics(self) -> dict[str, int]:
        """Counts of now: jobs, items by what they wait for, patches prepared."""
        with self._lock:
            return {
                "jobs": len(self._jobs),
                "waiting_items": sum(item.job.error is None for _, item in self._waiting),
                "prepared_items": len(self._prepared),
                "prepared_patches": self._prepared_patches,
            }

    # --- under the lock ---

    def _push_waiting(self, items: Iterable[Item]) -> None:
        for item in items:
            heapq.heappush(self._waiting, (item.order, item))
            self._may_prepare.notify()

    def _first_waiting(self) -> Item | None:
        """The item that is next to prepare. Forgets those of failed jobs, fails expired ones on the way."""
        while self._waiting:
            item = self._waiting[0][1]
            if item.job.error is None:
                if item.deadline_ns > time.monotonic_ns():
                    return item
                self._fail(item.job, ItemError(ErrorCode.DEADLINE))
            heapq.heappop(self._waiting)
        return None

    def _may_hold_prepared(self, item: Item) -> bool:
        """Whether the item fits beside what is prepared already; the only one always does, and measuring."""
        if item.known_plan is None:
            return True
        total_patches = self._prepared_patches + item.cost_patches
        return self._prepared_patches == 0 or total_patches <= self._limits.max_prepared_patches

    def _batch_wait_ns(self) -> int:
        """How long the device still waits for more items; nothing once a batch is full or none will come."""
        if not self._limits.max_wait_ns or self._finishing:
            return 0
        patches = sum(item.cost_patches for item in self._prepared)
        if len(self._prepared) >= self._limits.max_items or patches >= self._limits.max_patches:
            return 0
        oldest_ns = min(item.prepared_ns for item in self._prepared)
        return oldest_ns + self._limits.max_wait_ns - time.monotonic_ns()

    def _leave_prepared(self, item: Item) -> None:
        self._prepared_patches -= item.cost_patches
        self._may_prepare.notify()

    def _drop_expired_prepared(self) -> None:
        now_ns = time.monotonic_ns()
        for job in _jobs_of(self._prepared):
            if job.deadline_ns <= now_ns:
                self._fail(job, ItemError(ErrorCode.DEADLINE))

    def _fail(self, job: Job, error: ItemError, item_index: int = 0) -> None:
        """Set the job's error if it has none, forget its waiting items, end it if nobody holds one."""
        if job.error is None:
            job.error = error
            job.error_item = item_index
            for item in [item for item in self._prepared if item.job is job]:
                self._prepared.remove(item)
                self._leave_prepared(item)
                item.prepared = None
        self._end_if_free(job)

    def _publish_prefix(self, job: Job) -> None:
        """Let readers see the rows of all items up to the first that is not there yet."""
        before = job.ready_items
        while job.ready_items < len(job.items) and job.items[job.ready_items].state is ItemState.DONE:
            job.ready_items += 1
        if job.ready_items > before:
            last = job.items[job.ready_items - 1]
            self._publisher.rows(job, last.row_start + last.plan.rows)

    def _end_if_free(self, job: Job) -> None:
        if job.held_items > 0 or job.ticket not in self._jobs:
            return
        if job.error is not None:
            self._publisher.failed(job)
        elif job.ready_items == len(job.items):
            self._publisher.ready(job)
        else:
            return
        del self._jobs[job.ticket]
        self._wake_all_if_finished()

    def _finished(self) -> bool:
        return self._finishing and not self._jobs

    def _wake_all_if_finished(self) -> None:
        if self._finished():
            self._may_prepare.notify_all()
            self._may_encode.notify_all()


def _jobs_of(items: Iterable[Item]) -> list[Job]:
    """Each job once, in the order of its first item."""
    return list({item.job.ticket: item.job for item in items}.values())


def _is_before_forward(job: Job) -> bool:
    """Whether some item of the job has not been taken by the device yet."""
    reached = (ItemState.HELD_FOR_ENCODE, ItemState.DONE)
    return job.error is None and any(item.state not in reached for item in job.items)
