"""One get_*_features method of a model: which outputs of a processor it takes, and its rows as one table.

Used by every family whose tower is driven through Hugging Face's own method and nothing else.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import Prepared

Tensors: TypeAlias = Mapping[str, torch.Tensor]

# Feature extractors call their mask so; models name it after what it masks.
_MASK: Final = "attention_mask"


class FeatureMethod:
    """A method of the model, with the arguments that the processor provides. Not for several threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        offered: Sequence[str],
        processor: str,
        *,
        least_rows: int = 1,
    ) -> None:
        """offered: the names of the processor's outputs. least_rows: the method fails for fewer in a call.
        ConfigurationError if an argument that the method cannot do without is not among them."""
        self._model = model
        self._method: Callable[..., Any] = getattr(model, name)
        self._output_of = _matched(model, name, offered)
        self._least_rows = least_rows
        missing = _required(model, name) - set(self._output_of)
        if missing:
            raise ConfigurationError(
                f"{type(model).__name__}.{name} needs {', '.join(sorted(missing))}, "
                f"and {processor} gives {', '.join(offered)}"
            )

    @property
    def takes(self) -> list[str]:
        """Names of the processor's outputs that the method is called with."""
        return list(self._output_of.values())

    def arguments(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the method takes of a processor's outputs, by the method's names."""
        return {
            name: torch.as_tensor(outputs[output])
            for name, output in self._output_of.items()
            if output in outputs
        }

    def rows(self, arguments: Tensors) -> torch.Tensor:
        """(rows, dim) of everything in the arguments; DeepStack levels behind the main columns."""
        with torch.inference_mode():
            output = self._method(**self._placed(arguments))
            levels = [_main(output), *(getattr(output, "deepstack_features", None) or [])]
            tables = [_table(level) for level in levels]
            return tables[0] if len(tables) == 1 else torch.cat(tables, dim=-1)

    def encode_together(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        """Rows of each item by one call of the method."""
        counts = [prepared.plan.rows for prepared in batch]
        # Too few rows: everything twice.
        times = 2 if sum(counts) < self._least_rows else 1
        rows = self.rows(joined([self._placed(prepared.features) for prepared in batch] * times))
        return list(rows.split(counts * times))[: len(batch)]

    def encode_singly(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        """Rows of each item by a call of its own, for models of which nothing more is known."""
        return [self.rows(self._placed(prepared.features)) for prepared in batch]

    def _placed(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """On the model's device: some are there already (--preprocess-device), some not (processed items)."""
        return {
            name: tensor.to(
                self._model.device,
                self._model.dtype if tensor.is_floating_point() else tensor.dtype,
                non_blocking=True,
            )
            for name, tensor in arguments.items()
        }


def joined(items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The items' tensors one after the other, each zero-padded to the largest on all dimensions but the
    first, as Hugging Face's processors join what they are given together."""
    if len(items) == 1:
        return dict(items[0])
    return {name: _padded_together([item[name] for item in items]) for name in items[0]}


def _padded_together(tensors: list[torch.Tensor]) -> torch.Tensor:
    sizes = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_padded(tensor, sizes) for tensor in tensors])


def _padded(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    padding: list[int] = []
    for length, size in zip(reversed(tensor.shape[1:]), reversed(sizes), strict=True):
        padding += [0, size - length]
    return functional.pad(tensor, padding) if any(padding) else tensor


def _main(output: Any) -> Any:
    """The embeddings, wherever the model puts them."""
    if getattr(output, "pooler_output", None) is not None:
        return output.pooler_output
    return getattr(output, "last_hidden_state", output)


def _table(features: Any) -> torch.Tensor:
    """Rows one after the other, whether they came as a tensor, a list of them, or lists of lists."""
    if isinstance(features, torch.Tensor):
        return features.reshape(-1, features.shape[-1])
    tables = [_table(part) for part in features]
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _matched(model: PreTrainedModel, name: str, offered: Sequence[str]) -> dict[str, str]:
    """Argument of the method -> output of the processor.

    The arguments of the model inside count too: the outer one hands on whatever it is given.
    """
    names = {
        argument: None
        for method in _methods(model, name)
        for argument in inspect.signature(method).parameters
    }
    matched = {argument: argument for argument in names if argument in offered}
    masks = [argument for argument in names if argument.endswith("_mask") and argument not in matched]
    if _MASK in offered and _MASK not in matched and len(masks) == 1:
        matched[masks[0]] = _MASK
    return matched


def _methods(model: PreTrainedModel, name: str) -> list[Callable[..., Any]]:
    """The model's own, and that of the model inside, which the outer one may only hand on to."""
    inner = getattr(getattr(model, "model", None), name, None)
    return [getattr(model, name), *([inner] if inner else [])]


def _required(model: PreTrainedModel, name: str) -> set[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        argument.name
        for method in _methods(model, name)
        for argument in inspect.signature(method).parameters.values()
        if argument.default is inspect.Parameter.empty and argument.kind in named
    }
