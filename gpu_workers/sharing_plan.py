"""Which layers of a tower ranks can share, found from how its modules are built. Called by shard.py.

In an attention, the layers that make q, k and v are split by columns (each rank has some heads) and the one
behind them by rows; in a perceptron, the first layers by columns and the last by rows. What fits neither is
whole on every rank, which is right too.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import nn

from gpu_workers.errors import ConfigurationError

DATA_MODE_HINT: Final = "--tp-mode data works with any"

# Of an attention: one layer for q, k and v, whose rows are all of q, then all of k, then all of v; or three.
_FUSED: Final = ("qkv", "wqkv", "qkv_proj", "in_proj")
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
_ATTENTION_LAST: Final = ("proj", "out_proj", "o_proj", "wo", "projection_layer")
# What an attention calls the number of its heads, or all its heads' width; its forward may count with them.
_HEAD_COUNTS: Final = ("num_heads", "heads", "num_attention_heads", "num_key_value_heads")
_WIDTHS: Final = ("embed_dim", "all_head_size")
_NORMS_OF_HEADS: Final = ("q_norm", "k_norm")
# Layers of a perceptron that only meet element by element, and the one behind them.
_PERCEPTRONS: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate",), "down"),
    (("linear_fc1",), "linear_fc2"),
    (("linear_1",), "linear_2"),
    (("ffw_layer_1",), "ffw_layer_2"),
    (("fc1",), "fc2"),
    (("fc0",), "fc1"),
    (("in_proj",), "out_proj"),
)
_CONTAINERS: Final = (nn.ModuleDict, nn.ModuleList)  # have no forward: that of a module above uses them
_ACTIVATIONS: Final = (nn.GELU, nn.SiLU, nn.ReLU)


class Share(NamedTuple):
    """Layers that are split together, by their names in the model."""

    owner: str  # the module whose forward calls them
    columns: tuple[str, ...]
    rows: str
    attention: str = ""  # the module that counts heads, if they are an attention's
    fused: bool = False  # q, k and v are one layer


def plan_shares(model: nn.Module, world_size: int) -> list[Share]:
    """Every set of layers that world_size ranks can share.

    ConfigurationError that names the module whose heads cannot be split evenly, or if nothing can be shared.
    """
    shares = [
        share
        for name, module in model.named_modules()
        for share in _shares_of(model, name, module, world_size)
    ]
    if not shares:
        raise ConfigurationError(
            f"no layer of {type(model).__name__} can be shared by ranks: {DATA_MODE_HINT}"
        )
    return shares


def split_counts(attention: Any, width: int, world_size: int) -> None:
    """Let an attention whose heads were `width` wide together count those of one rank."""
    for name in _HEAD_COUNTS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, getattr(attention, name) // world_size)
    for name in _WIDTHS:
        if getattr(attention, name, None) == width:
            setattr(attention, name, width // world_size)


def _shares_of(model: nn.Module, name: str, module: nn.Module, world_size: int) -> Iterator[Share]:
    attention = _attention(model, name, module, world_size)
    if attention is not None:
        yield attention
    yield from _perceptrons(model, name, module, world_size, attention)


def _attention(model: nn.Module, name: str, module: nn.Module, world_size: int) -> Share | None:
    fused = next((one for one in _FUSED if _linear(module, one)), None)
    separate = next((names for names in _SEPARATE if all(_linear(module, one) for one in names)), None)
    last = next((one for one in _ATTENTION_LAST if _linear(module, one)), None)
    if last is None or (fused is None and separate is None):
        return None
    width = getattr(module, last).in_features
    head_width = _head_width(module, width)
    if head_width is None or _norms_all_heads(module, width):
        return None
    columns = separate if separate is not None else (fused or "",)
    if separate is None and getattr(module, columns[0]).out_features != 3 * width:
        return None
    widths = [width] if separate is None else [getattr(module, one).out_features for one in separate]
    for its_width in widths:
        if its_width // head_width % world_size:
            raise ConfigurationError(
                f"{name or type(module).__name__}: {its_width // head_width} attention heads cannot be "
                f"split over {world_size} ranks: {DATA_MODE_HINT}"
            )
    return Share(
        _owner(model, name), tuple(_full(name, one) for one in columns), _full(name, last), name,
        fused=separate is None,
    )  # fmt: skip


def _perceptrons(
    model: nn.Module, name: str, module: nn.Module, world_size: int, attention: Share | None
) -> Iterator[Share]:
    taken = set() if attention is None else {*attention.columns, attention.rows}
    for first, last in [*_PERCEPTRONS, *_in_sequence(module)]:
        if not all(_linear(module, one) for one in (*first, last)):
            continue
        names = {_full(name, one) for one in (*first, last)}
        inner = getattr(module, last).in_features
        fits = all(getattr(module, one).out_features == inner for one in first) and inner % world_size == 0
        if fits and not names & taken:
            taken |= names
            yield Share(_owner(model, name), tuple(_full(name, one) for one in first), _full(name, last))


def _in_sequence(module: nn.Module) -> Iterator[tuple[tuple[str], str]]:
    """Linear, activation, Linear among the children of a sequence."""
    if isinstance(module, (nn.Sequential, nn.ModuleList)):
        children = list(module.named_children())
        for (first, _), (_, between), (last, _) in zip(children, children[1:], children[2:], strict=False):
            if isinstance(between, _ACTIVATIONS):
                yield (first,), last


def _head_width(module: Any, width: int) -> int | None:
    for name in _HEAD_COUNTS:
        if isinstance(getattr(module, name, None), int):
            return int(width // getattr(module, name))
    return getattr(module, "head_dim", None)


def _norms_all_heads(module: nn.Module, width: int) -> bool:
    """Whether q or k are normalized over all heads together, which no rank has."""
    norms = [getattr(module, name, None) for name in _NORMS_OF_HEADS]
    return any(
        parameter.numel() == width
        for norm in norms
        if isinstance(norm, nn.Module)
        for parameter in norm.parameters()
    )


def _owner(model: nn.Module, name: str) -> str:
    while isinstance(model.get_submodule(name), _CONTAINERS):
        name = name.rpartition(".")[0]
    return name


def _linear(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Linear)


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
