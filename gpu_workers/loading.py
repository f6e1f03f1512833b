"""Loads the tower and proves that it encodes. Every rank of a group does this, at the same time."""

from gpu_workers.families.base import Family
from gpu_workers.families.registry import Loaded, load_family
from shm.messages import WorkerConfig
from shm.region import Region


def load_working(config: WorkerConfig, segment: Region) -> Loaded:
    """The family that config asks for, warmed up. ConfigurationError if that can never work.

    The ranks that share weights meet first, and load_towers splits what it loads over those who have met.
    """
    if config.world_size > 1 and config.tp_mode == "weights":
        from gpu_workers.shard import meet  # here, because it loads torch

        meet(config)
    loaded = load_family(config, segment)
    _warm_up(loaded.family)
    return loaded


def _warm_up(family: Family) -> None:
    """Encode a small item of each modality by all the steps that a request takes.

    RuntimeError if its rows are not as announced.
    """
    for sample in family.samples():
        plan = family.inspect(sample) or family.measure(sample)
        [rows] = family.forward([family.preprocess(sample, plan)])
        announced = (plan.rows, family.info().dim_of(sample.modality))
        if tuple(rows.shape) != announced:
            raise RuntimeError(
                f"the warm-up with {sample.modality} gave rows {tuple(rows.shape)}, announced {announced}"
            )
