"""One rank that loads checkpoints whole and shared, and says how far their rows are apart. See test_shard.

python -m tests.gpu_workers.sharing_rank RANK STORE_FD RESULT FAMILY=DIRECTORY...: RESULT gets a JSON object
of family -> {modality: distance, as a share of the rows' length}, or what loading it raised.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from torch import distributed

from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import Family
from gpu_workers.families.registry import load_on
from gpu_workers.shard import meet
from shm.messages import WorkerConfig
from tests.gpu_workers.harness import worker_config

WORLD_SIZE = 2


def main(rank: int, store_fd: int, result: Path, checkpoints: dict[str, str]) -> None:
    """All whole ones first: what is loaded after the ranks have met is shared."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    configs = {family: _config(directory, rank, store_fd) for family, directory in checkpoints.items()}
    whole = {family: _rows(load_on(config, torch.device("cpu"))) for family, config in configs.items()}
    meet(next(iter(configs.values())))
    found = {family: _compare(config, whole[family]) for family, config in configs.items()}
    distributed.destroy_process_group()
    result.write_text(json.dumps(found))


def _config(directory: str, rank: int, store_fd: int) -> WorkerConfig:
    return worker_config(
        checkpoint=directory,
        tower="auto",
        dtype="float32",
        trust_remote_code=True,
        rank=rank,
        world_size=WORLD_SIZE,
        store_fd=store_fd,
    )


def _compare(config: WorkerConfig, whole: dict[str, torch.Tensor]) -> dict[str, float] | str:
    try:
        shared = _rows(load_on(config, torch.device("cpu")))
    except ConfigurationError as error:
        return str(error)
    return {
        modality: float((shared[modality] - rows).norm() / rows.norm()) for modality, rows in whole.items()
    }


def _rows(family: Family) -> dict[str, torch.Tensor]:
    """Of its own samples, by modality."""
    rows: dict[str, torch.Tensor] = {}
    for sample in family.samples():
        plan = family.inspect(sample) or family.measure(sample)
        [its_rows] = family.forward([family.preprocess(sample, plan)])
        assert isinstance(its_rows, torch.Tensor)
        rows[sample.modality] = its_rows
    return rows


if __name__ == "__main__":
    pairs = [argument.split("=", 1) for argument in sys.argv[4:]]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), dict(pairs))
