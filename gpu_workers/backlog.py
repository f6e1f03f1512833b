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
    prepare_beside_forward: int | None = None  # items at a time while a forward runs; None: every thread

    @property
    def max_prepared_patches(self) -> int:
        """Patches being prepared or waiting prepared: two batches, so that the device never waits."""
        return 2 * self.max_patches


class EncodeResult(NamedTuple):
    """What became of an item that the device took: its rows are in its block, or `error` says why not."""

    item: Item
    error: ItemError | None = None


class PrepareResult(NamedTuple):
    """What became of an item that was to be prepared: its features, or why there are none."""

    item: Item
    outcome: Prepared | ItemError
    spent_ns: int = 0


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
        self._preparing = 0  # items HELD_FOR_PREPARE
        self._forwards = 0  # batches that the device has
        self._finishing = False

    # --- intake ---

    def open(self, *jobs: Job) -> None:
        """Take over jobs that have no block yet. Their unmeasured items are measured from now on."""
        with self._lock:
            for job in jobs:
                self._jobs[job.ticket] = job
                if not job.is_measured:
                    self._push_waiting(item for item in job.items if item.state is ItemState.UNMEASURED)

    def take_measured(self) -> Job | None:
        """A job that was opened with items of unknown size, once all sizes are known; None: none now."""
        with self._lock:
            while self._measured:
                job = self._measured.popleft()
                if job.error is None:
                    return job
            return None

    def admit(self, *jobs: Job, at_once: bool = False) -> list[Item]:
        """Let the items of open jobs go on: each has a block, and `Publisher.shapes_known` has heard of it.

        at_once: the caller prepares the items itself whose plan says so; they are returned, taken already.
        """
        taken: list[Item] = []
        with self._lock:
            for item in (item for job in jobs for item in job.items):
                if at_once and item.plan.prepares_at_once and self._may_hold_prepared(item):
                    self._hold_for_prepare(item)
                    taken.append(item)
                else:
                    self._push_waiting([item])
        return taken

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

        None: finished. It comes back by bring_measured or bring_prepared.
        """
        with self._lock:
            while True:
                item = self._first_waiting()
                if item is not None and self._may_hold_prepared(item) and self._has_core_to_prepare():
                    break
                if self._finished():
                    return None
                self._may_prepare.wait()
            heapq.heappop(self._waiting)
            self._hold_for_prepare(item)
            self._may_prepare.notify()  # perhaps the next one fits as well
            return item

    def bring_measured(self, item: Item, plan: ItemPlan, spent_ns: int) -> None:
        """The item's size is known; with the last one of its job intake hears of it."""
        with self._lock:
            job = item.job
            self._preparing -= 1
            self._let_prepare()
            job.held_items -= 1
            job.timings.preprocess_ns += spent_ns
            if job.error is not None:
                self._end_if_free(job)
                return
            job.set_plan(item, plan)
            if job.is_measured:
                self._measured.append(job)
                self._wake_intake()

    def bring_prepared(self, results: Sequence[PrepareResult]) -> None:
        """Items wait for the device from now on, unless their jobs failed meanwhile.

        A job fails by an item that could not be prepared, or measured.
        """
        with self._lock:
            now_ns = time.monotonic_ns()
            self._preparing -= len(results)
            self._let_prepare()
            for item, outcome, spent_ns in results:
                job = item.job
                job.held_items -= 1
                job.timings.preprocess_ns += spent_ns
                if job.error is None and isinstance(outcome, Prepared):
                    item.prepared = outcome
                    item.state = ItemState.PREPARED
                    item.prepared_ns = now_ns
                    self._prepared.append(item)
                    continue
                self._leave_prepared([item])
                if isinstance(outcome, ItemError):
                    self._fail(job, outcome, item.index)
                else:
                    self._end_if_free(job)
            if self._prepared:
                self._may_encode.notify()

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
            self._forwards += 1
            self._leave_prepared(batch)
            for item in batch:
                item.state = ItemState.HELD_FOR_ENCODE
                job = item.job
                job.held_items += 1
                job.taken_items += 1
                job.timings.batch_items = max(job.timings.batch_items, len(batch))
            self._prepared = [item for item in self._prepared if item.state is ItemState.PREPARED]
            return batch  # each item comes back through bring_batch

    def bring_batch(self, results: Sequence[EncodeResult], forward_ns: int, copy_ns: int) -> None:
        """The batch's rows are in their blocks, or say why not. Calls of one thread only, in batch order."""
        with self._lock:
            self._forwards -= 1
            self._let_prepare()  # all cores are theirs until the next batch
            jobs = _jobs_of(result.item for result in results)
            for job in jobs:
                job.timings.forward_ns += forward_ns
                job.timings.copy_ns += copy_ns
            for item, error in results:
                item.job.held_items -= 1
                item.state = ItemState.DONE
                item.prepared = None
                if error is not None:
                    self._set_error(item.job, error, item.index)
            for job in jobs:
                self._count_ready_items(job)
            self._end([job for job in jobs if self._is_over(job)])

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

    def _hold_for_prepare(self, item: Item) -> None:
        """A thread has the item, to measure or to prepare it."""
        item.state = ItemState.HELD_FOR_PREPARE
        item.job.held_items += 1
        self._preparing += 1
        self._prepared_patches += item.cost_patches
        timings = item.job.timings
        if timings.queue_ns == 0:
            timings.queue_ns = time.monotonic_ns() - timings.taken_ns

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

    def _has_core_to_prepare(self) -> bool:
        """Whether one more item may be prepared now. A forward on the processor goes first, and so does the
        first item of a job whose first rows are waited for; what they leave over prepares the next batch."""
        limit = self._limits.prepare_beside_forward
        if limit is None or self._preparing < limit:
            return True
        return not (self._forwards or self._prepared or self._first_rows_are_waited_for())

    def _first_rows_are_waited_for(self) -> bool:
        return any(job.is_streamed and not job.taken_items for job in self._jobs.values())

    def _batch_wait_ns(self) -> int:
        """How long the device still waits for more items; nothing once a batch is full or none will come."""
        if not self._limits.max_wait_ns or self._finishing:
            return 0
        patches = sum(item.cost_patches for item in self._prepared)
        if len(self._prepared) >= self._limits.max_items or patches >= self._limits.max_patches:
            return 0
        oldest_ns = min(item.prepared_ns for item in self._prepared)
        return oldest_ns + self._limits.max_wait_ns - time.monotonic_ns()

    def _leave_prepared(self, items: list[Item]) -> None:
        self._prepared_patches -= sum(item.cost_patches for item in items)
        self._let_prepare()

    def _let_prepare(self) -> None:
        """Fewer items are prepared, or being prepared: there may be room for the next."""
        if self._waiting and self._has_core_to_prepare():
            self._may_prepare.notify()  # whoever takes the next one wakes another

    def _drop_expired_prepared(self) -> None:
        now_ns = time.monotonic_ns()
        for job in _jobs_of(item for item in self._prepared if item.deadline_ns <= now_ns):
            self._fail(job, ItemError(ErrorCode.DEADLINE))

    def _fail(self, job: Job, error: ItemError, item_index: int = 0) -> None:
        """Set the job's error if it has none, and end it if nobody holds an item of it."""
        self._set_error(job, error, item_index)
        self._end_if_free(job)

    def _set_error(self, job: Job, error: ItemError, item_index: int) -> None:
        """The first error counts. Items of the job that wait for the device are forgotten."""
        if job.error is not None:
            return
        job.error = error
        job.error_item = item_index
        forgotten = [item for item in job.items if item.state is ItemState.PREPARED]
        self._leave_prepared(forgotten)
        for item in forgotten:
            self._prepared.remove(item)
            item.prepared = None

    def _count_ready_items(self, job: Job) -> None:
        """Let readers see the rows of all items up to the first that is not there yet."""
        before = job.ready_items
        while job.ready_items < len(job.items) and job.items[job.ready_items].state is ItemState.DONE:
            job.ready_items += 1
        if job.error is None and before < job.ready_items < len(job.items):  # all rows: READY tells it
            last = job.items[job.ready_items - 1]
            self._publisher.rows(job, last.row_start + last.plan.rows)

    def _is_over(self, job: Job) -> bool:
        """Whether the job has not ended yet and must now."""
        if job.held_items > 0 or job.ticket not in self._jobs:
            return False
        return job.error is not None or job.ready_items == len(job.items)

    def _end_if_free(self, job: Job) -> None:
        if self._is_over(job):
            self._end([job])

    def _end(self, jobs: list[Job]) -> None:
        """READY or FAILED, exactly once."""
        if not jobs:
            return
        self._publisher.ended(jobs)
        for job in jobs:
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
