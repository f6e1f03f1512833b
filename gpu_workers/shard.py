"""Shares a tower's weights over the ranks of a group, by torch's own tensor-parallel plan.

In every block of a vision tower the attention's qkv and the first layers of the MLP are split by columns, its
proj and the last layer of the MLP by rows, so that a block sums twice over the ranks. What fits no pattern is
whole on every rank, which is right too. Sums in another order round differently: rows differ from one
rank's by some units in the last place of the tower's type for each block.
"""

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from gpu_workers.errors import ConfigurationError
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)

# Longer than control lets any start or step take: control ends a group that hangs, this ends the wait.
_COLLECTIVE_LIMIT: Final = timedelta(minutes=15)
# Linear layers that only meet element by element: those split by columns, and the one split by rows.
_MLPS: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("linear_fc1",), "linear_fc2"),
    (("fc1",), "fc2"),
)


def meet(config: WorkerConfig) -> None:
    """Open the collectives of this group: NCCL between CUDA devices, gloo otherwise; all on this host.

    The ranks find each other through a memfd that only they have, so there is no port to guess and no file.
    ConfigurationError for a tower without weights.
    """
    if config.tower == "stub":
        raise ConfigurationError("the stub tower has no weights to share: only tp_mode data works")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(f"/proc/self/fd/{config.store_fd}", config.world_size)
    distributed.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=_COLLECTIVE_LIMIT,
    )


def share_weights(model: nn.Module, device: torch.device) -> None:
    """Keep only this rank's share of the weights, on `device`, where all of them are. The ranks have met.

    ConfigurationError as for sharing_plan.
    """
    world_size = distributed.get_world_size()
    plan = sharing_plan(model, world_size)
    mesh = DeviceMesh(device.type, list(range(world_size)))
    biases = _take_biases(model, plan)
    # None: every rank has read the checkpoint itself, so nothing needs to be sent.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for layer, bias in biases:
        layer.register_forward_hook(partial(_add_bias, bias))
    logger.info("%d layers are shared by %d ranks", len(plan), world_size)


def sharing_plan(model: nn.Module, world_size: int) -> dict[str, ParallelStyle]:
    """How each layer is split, by its name. The model's attention is ready for the split afterwards.

    ConfigurationError if the attention heads cannot be split evenly, or if there is nothing to share.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if _is_linear(module, "qkv", "proj") and hasattr(module, "num_heads"):
            _split_heads(module, world_size)
            plan |= {f"{prefix}qkv": ColwiseParallel(), f"{prefix}proj": RowwiseParallel()}
        for first, last in _MLPS:
            if _is_linear(module, *first, last) and getattr(module, last).in_features % world_size == 0:
                plan |= {f"{prefix}{one}": ColwiseParallel() for one in first}
                plan[f"{prefix}{last}"] = RowwiseParallel()
    if not plan:
        raise ConfigurationError("nothing of this tower can be shared: --tp-mode data works with any")
    return plan


def _take_biases(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> list[tuple[nn.Module, torch.Tensor]]:
    """The biases of layers that are split by rows: they are added once, to the sum over the ranks.

    With a bias in the layer DTensor (torch 2.14) moves whole operands between ranks instead of summing once.
    """
    layers = [model.get_submodule(name) for name, style in plan.items() if isinstance(style, RowwiseParallel)]
    taken = [(layer, layer.bias.data) for layer in layers if layer.bias is not None]
    for layer, _ in taken:
        layer.bias = None
    return taken


def _add_bias(bias: torch.Tensor, layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return output + bias


def _is_linear(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _split_heads(attention: Any, world_size: int) -> None:
    """Order the rows of qkv so that an even split gives each rank q, k and v of its own heads."""
    heads = attention.num_heads
    if heads % world_size:
        raise ConfigurationError(
            f"{heads} attention heads cannot be split over {world_size} ranks: --tp-mode data works with any"
        )
    qkv = attention.qkv
    for name, parameter in list(qkv.named_parameters(recurse=False)):
        rows = parameter.data.unflatten(0, (3, world_size, -1)).transpose(0, 1).flatten(0, 2)
        setattr(qkv, name, nn.Parameter(rows.contiguous(), requires_grad=False))
    attention.num_heads = heads // world_size
