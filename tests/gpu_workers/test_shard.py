"""The plan by which weights are shared. That shared towers give the same numbers: tests.e2e.test_group."""

import pytest
import torch
from torch import nn

from gpu_workers.errors import ConfigurationError
from gpu_workers.shard import sharing_plan


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, inner)
        self.linear_fc2 = nn.Linear(inner, width)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads)
        self.mlp = Mlp(width, inner)


def test_each_rank_gets_q_k_and_v_of_its_own_heads() -> None:
    block = Block(width=8, heads=4, inner=6)
    weight, bias = block.attn.qkv.weight.detach().clone(), block.attn.qkv.bias.detach().clone()
    plan = sharing_plan(block, world_size=2)
    assert block.attn.num_heads == 2
    assert list(plan) == ["attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    for rank in range(2):
        rows = [part * 8 + rank * 4 + row for part in range(3) for row in range(4)]  # two heads of two rows
        assert torch.equal(block.attn.qkv.weight.chunk(2)[rank], weight[rows])
        assert torch.equal(block.attn.qkv.bias.chunk(2)[rank], bias[rows])


def test_an_mlp_that_does_not_split_evenly_stays_whole() -> None:
    assert list(sharing_plan(Block(width=8, heads=4, inner=7), world_size=2)) == ["attn.qkv", "attn.proj"]


def test_heads_that_do_not_split_evenly_are_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="4 attention heads cannot be split over 3 ranks"):
        sharing_plan(Block(width=8, heads=4, inner=6), world_size=3)


def test_a_tower_with_nothing_to_share_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="nothing of this tower"):
        sharing_plan(nn.Linear(2, 2), world_size=2)
