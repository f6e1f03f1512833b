"""Which layers of a tower are shared, found from how its modules are built."""

from typing import Any

import pytest
import torch
from torch import nn

from gpu_workers.errors import ConfigurationError
from gpu_workers.sharing_plan import plan_shares


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.linear_fc2(self.linear_fc1(hidden).relu())


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads)
        self.mlp = Mlp(width, inner)


class Grouped(nn.Module):  # type: ignore[misc]
    """As many q as the width has, fewer k and v."""

    def __init__(self, heads: int, of_values: int) -> None:
        super().__init__()
        self.head_dim = 2
        self.q_proj = nn.Linear(8, 2 * heads)
        self.k_proj, self.v_proj = nn.Linear(8, 2 * of_values), nn.Linear(8, 2 * of_values)
        self.o_proj = nn.Linear(2 * heads, 8)


def layers(model: nn.Module, world_size: int = 2) -> list[str]:
    return [name for share in plan_shares(model, world_size) for name in (*share.columns, share.rows)]


def test_layers_of_a_sequence_are_shared_around_an_activation_alone() -> None:
    assert layers(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))) == ["0", "2"]
    with pytest.raises(ConfigurationError, match="no layer of Sequential"):
        layers(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)))


def test_an_mlp_that_does_not_split_evenly_stays_whole() -> None:
    assert layers(Block(width=8, heads=4, inner=7)) == ["attn.qkv", "attn.proj"]


def test_heads_that_are_normalized_together_stay_whole() -> None:
    block = Block(width=8, heads=4, inner=6)
    block.attn.q_norm = nn.LayerNorm(8)
    assert layers(block) == ["mlp.linear_fc1", "mlp.linear_fc2"]


def test_heads_that_do_not_split_evenly_are_an_error_that_names_their_module() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^attn: 4 attention heads cannot be split over 3 ranks: --tp"
    ):
        layers(Block(width=8, heads=4, inner=6), world_size=3)
    with pytest.raises(ConfigurationError, match=r"^Grouped: 1 attention heads cannot be split over 2 ranks"):
        layers(Grouped(heads=4, of_values=1))
    assert layers(Grouped(heads=4, of_values=2)) == ["q_proj", "k_proj", "v_proj", "o_proj"]
