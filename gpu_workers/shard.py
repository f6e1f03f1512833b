"""Shares a tower's weights over the ranks of a group, by torch's own tensor-parallel styles (DTensor).

sharing_plan.py says which layers. A block of a transformer then sums twice over the ranks. Sums in another
order round differently: rows differ from one rank's by some units in the last place of the tower's type for
each block.

A plan is found by names, and the code of a checkpoint may mean something else by them. So the first module of
each class is also kept whole until its first call, in the warm-up of the start, and must give the same there.
"""

import copy
import logging
import os
from collections.abc import Sequence
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
from gpu_workers.sharing_plan import DATA_MODE_HINT, Share, plan_shares, split_counts
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)

# Longer than control lets any start or step take: control ends a group that hangs, this ends the wait.
_COLLECTIVE_LIMIT: Final = timedelta(minutes=15)
# torch 2.14 counts collectives for its own flight recorder alone, and under a name that any version may drop:
# own_forward.py cannot do without, so weights mode is refused where it is gone.
_COUNT_OF_COLLECTIVES: Final = "_get_sequence_number_for_group"


def meet(config: WorkerConfig) -> None:
    """Open the collectives of this group: NCCL between CUDA devices, gloo otherwise; all on this host.

    The ranks find each other through a memfd that only they have, so there is no port to guess and no file.
    ConfigurationError for a tower without weights, and of a torch that counts no collectives.
    """
    if config.tower == "stub":
        raise ConfigurationError("the stub tower has no weights to share: only tp_mode data works")
    refuse_without_count(distributed.ProcessGroup)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device(config.device)
    if device.type == "cuda":
        # NCCL takes the current device; without this every rank would open a context on the first one too.
        torch.cuda.set_device(device)
    store = distributed.FileStore(f"/proc/self/fd/{config.store_fd}", config.world_size)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=_COLLECTIVE_LIMIT,
    )


def refuse_without_count(group_class: type) -> None:
    """ConfigurationError if groups of this class do not count their collectives."""
    if not hasattr(group_class, _COUNT_OF_COLLECTIVES):
        raise ConfigurationError(
            f"torch {torch.__version__} does not count collectives ({_COUNT_OF_COLLECTIVES} is gone), "
            f"so a rank cannot tell that another has failed: {DATA_MODE_HINT}"
        )


def collectives_entered() -> int:
    """How many collectives this process has entered since the ranks met. Any thread."""
    return int(getattr(distributed.group.WORLD, _COUNT_OF_COLLECTIVES)())


def share_weights(model: nn.Module, device: torch.device) -> None:
    """Keep only this rank's share of the weights, on `device`, where all of them are. The ranks have met.

    ConfigurationError as for plan_shares; the first forward raises it if a module turns out not to be one
    whose layers can be split.
    """
    world_size = distributed.get_world_size()
    shares = plan_shares(model, world_size)
    references = _references(model, shares)
    split_heads(model, shares, world_size)
    biases = _take_biases(model, shares)
    mesh = DeviceMesh(device.type, list(range(world_size)))
    # None: every rank has read the checkpoint itself, so nothing needs to be sent.
    parallelize_module(model, mesh, _styles(shares), src_data_rank=None)
    for layer, bias in biases:
        layer.register_forward_hook(partial(_add_bias, bias))
    for name, whole in references:
        compare_first_call(name, model.get_submodule(name), whole)
    logger.info("%d layers are shared by %d ranks", len(_styles(shares)), world_size)


def split_heads(model: nn.Module, shares: Sequence[Share], world_size: int) -> None:
    """Let an even split of q, k and v give each rank its own heads, and attentions count those only."""
    for share in shares:
        if share.attention or share.fused:
            width = model.get_submodule(share.rows).in_features
            if share.fused:
                _interleave(model.get_submodule(share.columns[0]), world_size)
            split_counts(model.get_submodule(share.attention), width, world_size)


def compare_first_call(name: str, module: nn.Module, whole: nn.Module) -> None:
    """Let the first call of `module`, whose layers are split, raise ConfigurationError unless `whole`, which
    is the same with all of its weights, gives the same."""
    split_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        del module.forward  # the class's own from now on; `whole` goes with this function
        what = f"{name} ({type(module).__name__})"
        try:
            found = split_forward(*args, **kwargs)
        except Exception as error:  # what the module makes of layers that it does not expect may be anything
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise ConfigurationError(
                f"{what} does not work with shared weights ({reason}): {DATA_MODE_HINT}"
            ) from error
        apart = _apart(_tensor(found), _tensor(whole(*args, **kwargs)))
        if not apart <= torch.finfo(_tensor(found).dtype).eps ** 0.5:
            raise ConfigurationError(
                f"{what} gives other numbers with shared weights, {apart:.2g} apart: {DATA_MODE_HINT}"
            )
        return found

    module.forward = forward


def _references(model: nn.Module, shares: Sequence[Share]) -> list[tuple[str, nn.Module]]:
    """A whole copy of the first module of each class that has layers to share, with its name."""
    first: dict[type[nn.Module], str] = {}
    for share in shares:
        first.setdefault(type(model.get_submodule(share.owner)), share.owner)
    return [(name, copy.deepcopy(model.get_submodule(name))) for name in first.values()]


def _styles(shares: Sequence[Share]) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for share in shares:
        styles |= {name: ColwiseParallel() for name in share.columns}
        styles[share.rows] = RowwiseParallel()
    return styles


def _take_biases(model: nn.Module, shares: Sequence[Share]) -> list[tuple[nn.Module, torch.Tensor]]:
    """The biases of layers that are split by rows: they are added once, to the sum over the ranks.

    With a bias in the layer DTensor (torch 2.14) moves whole operands between ranks instead of summing once.
    """
    layers: list[Any] = [model.get_submodule(share.rows) for share in shares]
    taken = [(layer, layer.bias.data) for layer in layers if layer.bias is not None]
    for layer, _ in taken:
        layer.bias = None
    return taken


def _add_bias(bias: torch.Tensor, layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return output + bias


def _interleave(qkv: nn.Module, world_size: int) -> None:
    """Order the rows of [q, k, v] as [q, k, v of rank 0's heads, of rank 1's, ...]."""
    for name, parameter in list(qkv.named_parameters(recurse=False)):
        rows = parameter.data.unflatten(0, (3, world_size, -1)).transpose(0, 1).flatten(0, 2)
        setattr(qkv, name, nn.Parameter(rows.contiguous(), requires_grad=False))


def _tensor(output: Any) -> torch.Tensor:
    """A module's output, or the first of several."""
    return output if isinstance(output, torch.Tensor) else _tensor(output[0])


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """As a share of expected's length, or of 1 if that is 0; infinite where not even the shapes agree."""
    if found.shape != expected.shape:
        return float("inf")
    length = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (length or 1.0)
