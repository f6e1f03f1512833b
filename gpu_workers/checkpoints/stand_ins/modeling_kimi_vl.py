"""A stand-in for Kimi-VL: MoonViT, its projector and a language model, with the real model's weight names."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from .configuration_kimi_vl import KimiVLConfig


class MoonVisionPatchEmbed(nn.Module):  # type: ignore[misc]
    """A convolution, and a table of positions that is stretched over each grid."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        side, width = config["patch_size"], config["hidden_size"]
        self.proj = nn.Conv2d(3, width, kernel_size=side, stride=side)
        self.pos_emb = nn.Module()
        self.pos_emb.weight = nn.Parameter(
            torch.randn(config["init_pos_emb_height"], config["init_pos_emb_width"], width)
        )

    def forward(self, pixels: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        """(patches, 3, side, side) -> (patches, width)."""
        return self.proj(pixels).flatten(1) + torch.cat([self._stretched(grid) for grid in grid_hws.tolist()])

    def _stretched(self, grid: list[int]) -> torch.Tensor:
        table = self.pos_emb.weight
        if list(table.shape[:2]) == grid:
            return table.flatten(0, 1)
        stretched = functional.interpolate(table.permute(2, 0, 1)[None], size=grid, mode="bicubic")
        return stretched[0].permute(1, 2, 0).flatten(0, 1)


class MoonVitEncoderLayer(nn.Module):  # type: ignore[misc]
    """Attention within each grid, turned by the patches' places, and a perceptron."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.ModuleDict(
            {
                "fc0": nn.Linear(width, config["intermediate_size"]),
                "fc1": nn.Linear(config["intermediate_size"], width),
            }
        )

    def forward(self, hidden: torch.Tensor, lengths: list[int], turns: torch.Tensor) -> torch.Tensor:
        """turns: (patches, head width / 2), complex."""
        query, key, value = self.wqkv(self.norm0(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = _turned(query, turns), _turned(key, turns)
        mixed = [
            functional.scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in grid))[0]
            for grid in zip(*(one.split(lengths) for one in (query, key, value)), strict=True)
        ]
        hidden = hidden + self.wo(torch.cat([one.transpose(0, 1).flatten(1) for one in mixed]))
        inner = functional.gelu(self.mlp["fc0"](self.norm1(hidden)), approximate="tanh")
        return hidden + self.mlp["fc1"](inner)


class MoonVitPretrainedModel(nn.Module):  # type: ignore[misc]
    """Patches of any number of grids -> merged patches, a table for each grid."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.head_width = config["hidden_size"] // config["num_attention_heads"]
        self.merge_kernel_size = config["merge_kernel_size"]
        self.patch_embed = MoonVisionPatchEmbed(config)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            MoonVitEncoderLayer(config) for _ in range(config["num_hidden_layers"])
        )
        self.encoder.final_layernorm = nn.LayerNorm(config["hidden_size"])

    def forward(self, pixels: torch.Tensor, grid_hws: torch.Tensor) -> list[torch.Tensor]:
        """(merged patches, patches of one, width) of each grid."""
        grids = grid_hws.tolist()
        lengths = [high * wide for high, wide in grids]
        hidden = self.patch_embed(pixels.to(self.patch_embed.proj.weight.dtype), grid_hws)
        turns = torch.cat([self._turns(high, wide, hidden.device) for high, wide in grids])
        for block in self.encoder.blocks:
            hidden = block(hidden, lengths, turns)
        hidden = self.encoder.final_layernorm(hidden)
        return [self._merged(table, *grid) for table, grid in zip(hidden.split(lengths), grids, strict=True)]

    def _turns(self, high: int, wide: int, device: torch.device) -> torch.Tensor:
        rates = 10_000 ** -(torch.arange(0, self.head_width, 4, device=device) / self.head_width)
        row, column = torch.meshgrid(
            torch.arange(high, device=device), torch.arange(wide, device=device), indexing="ij"
        )
        angles = torch.stack([place.flatten()[:, None] * rates for place in (column, row)], dim=-1).flatten(1)
        return torch.polar(torch.ones_like(angles), angles)

    def _merged(self, table: torch.Tensor, high: int, wide: int) -> torch.Tensor:
        down, across = self.merge_kernel_size
        split = table.view(high // down, down, wide // across, across, -1)
        return split.permute(0, 2, 1, 3, 4).reshape(-1, down * across, table.shape[-1])


class KimiVLMultiModalProjector(nn.Module):  # type: ignore[misc]
    """Merged patches -> rows as wide as the language model."""

    def __init__(self, vision: dict[str, Any], out_width: int) -> None:
        super().__init__()
        down, across = vision["merge_kernel_size"]
        merged = vision["hidden_size"] * down * across
        self.pre_norm = nn.LayerNorm(vision["hidden_size"], eps=1e-5)
        self.linear_1, self.linear_2 = nn.Linear(merged, merged), nn.Linear(merged, out_width)

    def forward(self, image_features: list[torch.Tensor]) -> torch.Tensor:
        """(rows, out_width) of all grids."""
        merged = self.pre_norm(torch.cat(image_features)).flatten(1)
        return self.linear_2(functional.gelu(self.linear_1(merged)))


class KimiVLForConditionalGeneration(PreTrainedModel):  # type: ignore[misc]
    """As the real model: `vision_tower` and `multi_modal_projector` beside `language_model`."""

    config_class = KimiVLConfig
    main_input_name = "input_ids"

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__(config)
        vision, text = config.vision_config or {}, config.text_config or {}
        self.vision_tower = MoonVitPretrainedModel(vision)
        self.multi_modal_projector = KimiVLMultiModalProjector(vision, text["hidden_size"])
        self.language_model = nn.Module()
        self.language_model.embed_tokens = nn.Embedding(text["vocab_size"], text["hidden_size"])
        self.language_model.layers = nn.ModuleList(
            nn.Linear(text["hidden_size"], text["hidden_size"]) for _ in range(text["num_hidden_layers"])
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Of tokens."""
        return self.language_model.embed_tokens

    def _extract_image_features(
        self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor
    ) -> torch.Tensor:
        """(rows, hidden size of the language model) of all pictures."""
        return self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))


def _turned(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """(patches, heads, head width), each pair of values turned as a complex number."""
    pairs = torch.view_as_complex(values.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(values.dtype)
