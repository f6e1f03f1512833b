"""What a recipe of a small checkpoint is, and what the recipes share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin


@dataclass(frozen=True, slots=True)
class Size:
    """How large a checkpoint is: the transformer of the tower, and the language model behind it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    out_hidden_size: int
    language_layers: int = 2


SIZES: Final = {
    "tiny": Size(depth=4, hidden_size=32, intermediate_size=64, heads=2, out_hidden_size=64),
    # A forward of 224 x 224 takes some 30 ms on one core: worth measuring.
    "bench": Size(depth=4, hidden_size=192, intermediate_size=768, heads=4, out_hidden_size=384),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """What a recipe gives: the model's class and config, and the processor beside it, or a part of one."""

    model_class: type[PreTrainedModel]
    config: Any
    processor: ProcessorMixin | BaseImageProcessor | PreTrainedTokenizerFast


Recipe: TypeAlias = Callable[[Size], Draft]


def byte_tokenizer(
    special_tokens: Sequence[str], named_tokens: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """One token a byte: enough for the processors that want a tokenizer.

    named_tokens: special tokens that are attributes of the tokenizer too, by the attribute's name.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(named_tokens or {})
    extra = {"extra_special_tokens": names} if names else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **extra
    )
    fast.add_special_tokens({"additional_special_tokens": [*special_tokens, *names.values()]})
    return fast


def text_config(size: Size, **changes: Any) -> dict[str, Any]:
    """A language model whose width is the tower's output width."""
    return {
        "vocab_size": 512,
        "hidden_size": size.out_hidden_size,
        "intermediate_size": 2 * size.out_hidden_size,
        "num_hidden_layers": size.language_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
