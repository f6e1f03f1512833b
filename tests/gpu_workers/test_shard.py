"""Towers whose weights are shared: the split, the check of a module's first call, and the numbers, with two
real ranks. tests.e2e.test_group does the same through the daemon."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_workers.errors import ConfigurationError
from gpu_workers.shard import compare_first_call, refuse_without_count, split_heads
from gpu_workers.sharing_plan import plan_shares
from tests.gpu_workers.conftest import TinyCheckpoints
from tests.gpu_workers.sharing_rank import WORLD_SIZE
from tests.gpu_workers.test_sharing_plan import Block, Mlp, layers

# One for each way in which attentions and perceptrons are built; what is left out has the same towers.
FAMILIES = ("qwen3_vl", "qwen2_5_omni", "glmasr", "gemma3n", "llava", "internvl", "kimi_vl")
# float32 sums over two halves instead of one whole, through a tiny tower's four blocks
RELATIVE_ROUNDING = 1e-5


def test_each_rank_gets_q_k_and_v_of_its_own_heads() -> None:
    block = Block(width=8, heads=4, inner=6)
    weight, bias = block.attn.qkv.weight.detach().clone(), block.attn.qkv.bias.detach().clone()
    assert layers(block) == ["attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    split_heads(block, plan_shares(block, 2), 2)
    assert block.attn.num_heads == 2
    for rank in range(2):
        rows = [part * 8 + rank * 4 + row for part in range(3) for row in range(4)]  # two heads of two rows
        assert torch.equal(block.attn.qkv.weight.chunk(2)[rank], weight[rows])
        assert torch.equal(block.attn.qkv.bias.chunk(2)[rank], bias[rows])


def test_a_module_that_gives_other_numbers_with_its_layers_split_is_refused_at_its_first_call() -> None:
    module = Mlp(4, 6).requires_grad_(False)
    compare_first_call("tower.mlp", module, copy.deepcopy(module))
    right = module(torch.ones(1, 4))
    assert torch.equal(module(torch.ones(1, 4)), right)
    compare_first_call("tower.mlp", module, Mlp(4, 6).requires_grad_(False))
    with pytest.raises(ConfigurationError, match=r"^tower.mlp \(Mlp\) gives other numbers .*--tp-mode data"):
        module(torch.ones(1, 4))
    whole = copy.deepcopy(module)
    whole.linear_fc2.weight.zero_()
    whole.linear_fc2.bias.zero_()
    compare_first_call("tower.mlp", module, whole)
    with pytest.raises(ConfigurationError, match="gives other numbers"):
        module(torch.ones(1, 4))
    compare_first_call("tower.mlp", module, copy.deepcopy(module))
    with pytest.raises(ConfigurationError, match=r"^tower.mlp \(Mlp\) does not work with shared weights"):
        module(torch.ones(1, 5))


def test_a_torch_that_does_not_count_collectives_is_refused() -> None:
    refuse_without_count(torch.distributed.ProcessGroup)
    with pytest.raises(ConfigurationError, match=r"does not count collectives .*: --tp-mode data works"):
        refuse_without_count(object)


def test_ranks_that_share_a_tower_give_the_rows_of_one(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    store = os.memfd_create("store")
    checkpoints = [f"{family}={tiny_checkpoints[family]}" for family in FAMILIES]
    results = [tmp_path / f"rank-{rank}.json" for rank in range(WORLD_SIZE)]
    command = [sys.executable, "-m", "tests.gpu_workers.sharing_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store), str(result), *checkpoints], pass_fds=[store])
        for rank, result in enumerate(results)
    ]
    os.close(store)
    assert [rank.wait() for rank in ranks] == [0] * WORLD_SIZE
    for result in results:
        found = json.loads(result.read_text())
        assert sorted(found) == sorted(FAMILIES)
        for family, distances in found.items():
            assert isinstance(distances, dict), f"{family}: {distances}"
            assert distances, family
            for modality, distance in distances.items():
                assert distance <= RELATIVE_ROUNDING, f"{family}, {modality}"
