"""A stand-in for MiMo-V2: small towers, a language model, and the methods that an encoder server calls."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from .configuration_mimo_v2 import MiMoV2Config
from .processing_mimo_v2 import MiMoV2EncoderProcessor


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    """Sines of its shape, so that rows depend on where their patches lie."""
    length, width = hidden.shape
    rates = torch.arange(1, width + 1, device=hidden.device) / width
    return torch.sin(torch.arange(length, device=hidden.device)[:, None] * rates[None]).to(hidden.dtype)


class MiMoV2Block(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron over one sequence."""

    def __init__(self, width: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.down = nn.Linear(width, intermediate), nn.Linear(intermediate, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(length, width)."""
        split = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(1, 2, 0, 3)[:, None]
        mixed = functional.scaled_dot_product_attention(query, key, value)[0]
        hidden = hidden + self.proj(mixed.permute(1, 0, 2).flatten(1))
        return hidden + self.down(functional.silu(self.gate(self.norm2(hidden))))


class MiMoVisionTransformer(nn.Module):  # type: ignore[misc]
    """Flat patches of any number of grids -> one row for each merge x merge patches."""

    def __init__(self, config: dict[str, Any], out_width: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.merged = config["spatial_merge_size"] ** 2
        patch_values = 3 * config["temporal_patch_size"] * config["patch_size"] ** 2
        self.patch_embed = nn.Linear(patch_values, width, bias=False)
        self.blocks = nn.ModuleList(
            MiMoV2Block(width, config["intermediate_size"], config["num_heads"])
            for _ in range(config["depth"])
        )
        self.merger = nn.Sequential(
            nn.LayerNorm(self.merged * width), nn.Linear(self.merged * width, out_width)
        )

    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """(patches, values) and (grids, 3) -> (rows, out_width)."""
        hidden = self.patch_embed(pixel_values.to(self.patch_embed.weight.dtype))
        frames = [height * width for time, height, width in grid_thw.tolist() for _ in range(time)]
        return torch.cat([self._frame(frame) for frame in hidden.split(frames)])

    def _frame(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + _positions(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.merger(hidden.reshape(len(hidden) // self.merged, -1))


class MiMoAudioEncoder(nn.Module):  # type: ignore[misc]
    """Spectra of one sound -> one row for each group of frames."""

    def __init__(self, config: dict[str, Any], out_width: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.group = config["group_size"]
        self.speech_embeddings = nn.Linear(self.group * config["n_mels"], width)
        self.block = MiMoV2Block(width, config["intermediate_size"], config["num_heads"])
        self.projection = nn.Linear(width, out_width)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        """(frames, mels), a multiple of the group -> (rows, out_width)."""
        grouped = spectra.reshape(len(spectra) // self.group, -1).to(self.projection.weight.dtype)
        hidden = self.speech_embeddings(grouped)
        hidden = hidden + _positions(hidden)
        return self.projection(self.block(hidden))


class MiMoV2Model(nn.Module):  # type: ignore[misc]
    """The language model, which an encoder server never loads."""

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(MiMoV2Block(width, 2 * width, 4) for _ in range(config.num_hidden_layers))


class MiMoV2ForCausalLM(PreTrainedModel):  # type: ignore[misc]
    """As the real model: `visual` and `audio_encoder` beside `model` and `lm_head`."""

    config_class = MiMoV2Config
    main_input_name = "input_ids"

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__(config)
        self.model = MiMoV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.visual = MiMoVisionTransformer(config.vision_config or {}, config.hidden_size)
        self.audio_encoder = MiMoAudioEncoder(config.audio_config or {}, config.hidden_size)
        self._encoder_processor: MiMoV2EncoderProcessor | None = None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Of tokens."""
        return self.model.embed_tokens

    def preprocess_mm_for_encoder(self, mm_data: Any, modality: Any, config: Any) -> dict[str, Any]:
        """Pictures and sound are loaded, videos are files."""
        if self._encoder_processor is None:
            self._encoder_processor = MiMoV2EncoderProcessor(self.config, config)
        return self._encoder_processor(mm_data, modality)

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        """(rows, hidden_size) of all items."""
        return self.visual(
            torch.cat([item.feature for item in items]), torch.cat([item.image_grid_thw for item in items])
        )

    def get_video_feature(self, items: list[Any]) -> torch.Tensor:
        """(rows, hidden_size) of all items' frames."""
        return self.visual(
            torch.cat([item.feature for item in items]), torch.cat([item.video_grid_thw for item in items])
        )

    def get_audio_feature(self, items: list[Any]) -> torch.Tensor:
        """(rows, hidden_size) of all sounds of all items."""
        sounds = [spectra for item in items for spectra in item.feature]
        device = self.audio_encoder.projection.weight.device
        return torch.cat([self.audio_encoder(spectra.to(device)) for spectra in sounds])

    def encode_video_audio(self, mm_inputs: dict[str, Any]) -> torch.Tensor | None:
        """(rows, hidden_size): what each video's temporal patches hear, one after the other."""
        if not mm_inputs.get("video_audio_features"):
            return None
        starts = iter(mm_inputs["video_audio_segment_starts_flat"])
        lengths = iter(mm_inputs["video_audio_segment_lens_flat"])
        heard = []
        sounds = iter(mm_inputs["video_audio_features"])
        device = self.audio_encoder.projection.weight.device
        for unit_count in mm_inputs["video_audio_per_video_num_units"]:
            if unit_count == 0:
                continue
            rows = self.audio_encoder(next(sounds).to(device))
            for _ in range(unit_count):
                start = next(starts)
                heard.append(rows[start : start + next(lengths)])
        return torch.cat(heard)
