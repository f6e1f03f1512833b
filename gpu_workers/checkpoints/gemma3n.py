"""Recipe of Gemma 3n without its vision tower, which is timm's."""

import transformers

from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer, text_config
from gpu_workers.families.gemma3n import without_eyes

_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
_TEXT_TOKENS = 512
_EMBEDDED_TOKENS = 128  # of pictures, and of sound


def gemma3n(size: Size) -> Draft:
    """The conformer and a language model whose layers take embeddings of their own."""
    tokenizer = byte_tokenizer([], _TOKENS)
    for name, token in _TOKENS.items():
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    language = text_config(size, hidden_size_per_layer_input=16, num_kv_shared_layers=0, laurel_rank=8)
    offset = _TEXT_TOKENS + _EMBEDDED_TOKENS
    config = transformers.Gemma3nConfig(
        text_config={
            **language,
            "vocab_size": offset + _EMBEDDED_TOKENS,
            "vocab_size_per_layer_input": _TEXT_TOKENS,
            "layer_types": ["full_attention"] * size.language_layers,
            "activation_sparsity_pattern": [0.0] * size.language_layers,
            "sliding_window": 64,
        },
        vision_config={"hidden_size": size.hidden_size, "vocab_offset": _TEXT_TOKENS},
        audio_config={
            "hidden_size": size.hidden_size,
            "vocab_offset": offset,
            "vocab_size": _EMBEDDED_TOKENS,
            "conf_num_hidden_layers": 2,
            "conf_num_attention_heads": size.heads,
            "sscp_conv_channel_size": [16, 8],
        },
        audio_token_id=offset + 1,
        image_token_id=_TEXT_TOKENS + 1,
    )
    processor = transformers.Gemma3nProcessor(
        feature_extractor=transformers.Gemma3nAudioFeatureExtractor(),
        image_processor=transformers.SiglipImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
    )
    return Draft(without_eyes(), config, processor)
