"""Recipes of the families that take sound alone."""

from typing import Any, Final

import transformers

from gpu_workers.checkpoints.recipe import Draft, Size, byte_tokenizer, text_config

_QWEN3_ASR_TOKENS: Final = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def qwen2_audio(size: Size) -> Draft:
    """A Whisper encoder of 30 seconds with an average pool of two."""
    tokenizer = byte_tokenizer(["<|im_start|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    config = transformers.Qwen2AudioConfig(
        text_config=text_config(size, model_type="qwen2"),
        audio_config={
            "model_type": "qwen2_audio_encoder",
            **_whisper_config(size),
            "max_source_positions": 1500,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128), tokenizer=tokenizer
    )
    return Draft(transformers.Qwen2AudioForConditionalGeneration, config, processor)


def qwen3_asr(size: Size) -> Draft:
    """Qwen3-Omni's audio tower before a projector."""
    tokenizer = byte_tokenizer(["<|im_start|>"], _QWEN3_ASR_TOKENS)
    config = transformers.Qwen3ASRConfig(
        text_config=text_config(size, model_type="qwen3"),
        audio_config={
            **_whisper_config(size),
            "output_dim": size.out_hidden_size,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": 16,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
    )
    processor = transformers.Qwen3ASRProcessor(
        feature_extractor=transformers.Qwen3ASRFeatureExtractor(), tokenizer=tokenizer
    )
    return Draft(transformers.Qwen3ASRForConditionalGeneration, config, processor)


def glmasr(size: Size) -> Draft:
    """Windows of 30 seconds, four frames to a token."""
    tokenizer = byte_tokenizer(["<|user|>", "<|assistant|>", "<|pad|>"])
    config = transformers.GlmAsrConfig(
        text_config=text_config(size, model_type="llama"),
        audio_config={
            "hidden_size": size.hidden_size,
            "intermediate_size": 4 * size.hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.heads,
            "num_mel_bins": 128,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
    )
    processor = transformers.GlmAsrProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128), tokenizer=tokenizer
    )
    return Draft(transformers.GlmAsrForConditionalGeneration, config, processor)


def _whisper_config(size: Size) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": size.heads,
        "encoder_ffn_dim": size.intermediate_size,
        "d_model": size.hidden_size,
    }
