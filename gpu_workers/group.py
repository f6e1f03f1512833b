"""Rank 0 of a tensor-parallel group: two ways to share the work with the other ranks.

DataRanks gives every item to one rank, chosen when the item is preprocessed: the one with the fewest patches
under way. So decoding, preprocessing, forwards and copies of a batch are all split. A rank writes the rows of
its items into the group's segment and isolates items that break its forward by itself.

WeightsRanks has every rank preprocess every item and forward every batch, each with its share of the weights;
all must fare alike, and rank 0 alone writes the rows and isolates. Every rank runs the same forwards in the
same order, because plans are taken in order.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from gpu_workers.backlog import EncodeResult
from gpu_workers.errors import ItemError, RanksDisagree
from gpu_workers.families.base import Family, Prepared, Rows
from gpu_workers.jobs import Item, Job
from gpu_workers.leader import ForwardReply, Leader, PrepareReply
from gpu_workers.own_forward import OwnForward
from gpu_workers.ranks import Alone, HandedOut, Ranks
from shm.group import BATCH_KEY_BYTES, GroupLeader
from shm.messages import WorkerConfig
from shm.region import Region


def open_ranks(config: WorkerConfig, family: Family, group: Region | None) -> Ranks:
    """This worker's ranks; returns when all of them have loaded."""
    if group is None:
        return Alone(family)
    own = None if config.tp_mode == "data" else own_forward()
    leader = Leader(GroupLeader(group), own)
    leader.start()
    leader.wait_loaded()
    return DataRanks(leader, family) if own is None else WeightsRanks(leader, family, own)


def own_forward() -> OwnForward:
    """Of a rank that shares weights and has met the others."""
    from gpu_workers.shard import collectives_entered  # here, because it loads torch

    return OwnForward(collectives_entered)


def batch_key_digest(prepared: Prepared) -> bytes:
    """BATCH_KEY_BYTES that are equal for items which may share a forward, on whichever rank they are."""
    key = prepared.batch_key or prepared.modality
    return hashlib.blake2s(key.encode(), digest_size=BATCH_KEY_BYTES).digest()


class DataRanks:
    """Items are split over the ranks."""

    answer_later = True

    def __init__(self, leader: Leader, family: Family) -> None:
        self._leader = leader
        self._family = family
        self._lock = threading.Lock()
        self._rank_of: dict[tuple[int, int], int] = {}  # by ticket and index, until the item's rows are there
        self._patches = [0, *(0 for _ in leader.others)]  # under way, by rank

    def preprocess(self, item: Item) -> Prepared:
        """On the rank with the least to do, which keeps the features."""
        rank = self._assign(item)
        try:
            return self._preprocess_on(rank, item)
        except BaseException:
            self.release([item])
            raise

    def hand_out(self, batch: list[Item]) -> HandedOut:
        """Each rank gets those of its items in one plan."""
        with self._lock:
            ranks = [self._rank_of[_key(item)] for item in batch]
        asked: list[tuple[list[Item], Future[ForwardReply]]] = []
        for rank in self._leader.others:
            items = [item for item, its_rank in zip(batch, ranks, strict=True) if its_rank == rank]
            if items:
                asked.append((items, self._leader.forward(rank, items, writes=True)))
        own = [item for item, its_rank in zip(batch, ranks, strict=True) if its_rank == 0]
        return HandedOut(own, _DataAnswers(self, batch, asked))

    def forward(self, batch: list[Item], attempt: Callable[[], list[Rows]]) -> list[Rows]:
        """This rank's items concern nobody else."""
        return attempt()

    def forget(self, job: Job) -> None:
        """Every rank drops what it has prepared of the job."""
        self.release(job.items)
        self._leader.forget(job.ticket)

    def release(self, items: Sequence[Item]) -> None:
        """These are no load any more; those that are not assigned are passed over."""
        with self._lock:
            for item in items:
                rank = self._rank_of.pop(_key(item), None)
                if rank is not None:
                    self._patches[rank] -= item.cost_patches

    def _assign(self, item: Item) -> int:
        with self._lock:
            rank = min(range(len(self._patches)), key=self._patches.__getitem__)
            self._rank_of[_key(item)] = rank
            self._patches[rank] += item.cost_patches
        return rank

    def _preprocess_on(self, rank: int, item: Item) -> Prepared:
        if rank == 0:
            prepared = self._family.preprocess(item.media, item.plan)
            return msgspec.structs.replace(prepared, batch_key=batch_key_digest(prepared).hex())
        reply = self._leader.prepare(rank, item).result()
        if reply.error is not None:
            raise reply.error
        return Prepared(item.media.modality, item.plan, batch_key=reply.batch_key.hex())


class _DataAnswers:
    """What the other ranks make of their items of one batch."""

    def __init__(
        self,
        ranks: DataRanks,
        batch: list[Item],
        asked: list[tuple[list[Item], Future[ForwardReply]]],
    ) -> None:
        self._ranks = ranks
        self._batch = batch
        self._asked = asked

    def wait(self) -> list[EncodeResult]:
        """Until every rank's done word: rows of its items are in their blocks, or an error says why not."""
        results: list[EncodeResult] = []
        for items, answer in self._asked:
            errors = answer.result().errors
            results += [EncodeResult(item, errors.get(_key(item))) for item in items]
        self._ranks.release(self._batch)
        return results


class WeightsRanks:
    """Every rank has a share of the weights and works on every item."""

    answer_later = True

    def __init__(self, leader: Leader, family: Family, own: OwnForward) -> None:
        """own: the leader's too."""
        self._leader = leader
        self._family = family
        self._own = own
        self._answers = _WeightsAnswers()

    def preprocess(self, item: Item) -> Prepared:
        """On all ranks at once; the first error counts."""
        asked = [self._leader.prepare(rank, item) for rank in self._leader.others]
        try:
            prepared = self._family.preprocess(item.media, item.plan)
        finally:
            errors = _errors(asked)  # also after an error here: they read the item's bytes until then
        if errors:
            raise errors[0]
        return prepared

    def hand_out(self, batch: list[Item]) -> HandedOut:
        """All items are this rank's, too: plans go out with each forward."""
        self._answers = _WeightsAnswers()
        return HandedOut(batch, self._answers)

    def forward(self, batch: list[Item], attempt: Callable[[], list[Rows]]) -> list[Rows]:
        """All ranks forward the batch together."""
        number, asked = self._leader.forward_together(batch)
        try:
            with self._own.of(number):
                rows = attempt()
        except Exception as error:
            collectives = self._own.collectives()
            self._leader.abandon(number, collectives)
            # A rank that stands still in a collective ends itself, and so this wait, with the group.
            replies = [answer.result() for answer in asked]
            if not all(reply.failed and reply.collectives == collectives for reply in replies):
                raise RanksDisagree("a forward failed on rank 0 alone") from error
            raise
        self._answers.asked += asked
        return rows

    def forget(self, job: Job) -> None:
        """Every rank drops what it has prepared of the job."""
        self._leader.forget(job.ticket)


class _WeightsAnswers:
    """The other ranks' done words for the forwards of one batch that succeeded here."""

    def __init__(self) -> None:
        self.asked: list[Future[ForwardReply]] = []

    def wait(self) -> list[EncodeResult]:
        """Nothing, once all succeeded. RanksDisagree if one did not: the rows cannot be trusted."""
        if any(answer.result().failed for answer in self.asked):
            raise RanksDisagree("a forward failed on another rank")
        return []


def _key(item: Item) -> tuple[int, int]:
    return (item.job.ticket, item.index)


def _errors(asked: Sequence[Future[PrepareReply]]) -> list[ItemError]:
    replies = [answer.result() for answer in asked]
    return [reply.error for reply in replies if reply.error is not None]
