"""The ears of Whisper's descendants: how each turns samples into mel frames, and mel frames into rows.

The reference is the model's own get_audio_features (Qwen2-Audio has none: what its forward does) on what its
processor makes of the same samples, alone.
"""

from typing import Any, Final

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from gpu_workers.families.base import Prepared, Rows
from gpu_workers.families.composed import tensors_of
from gpu_workers.families.processed_sound import FEATURES, MASK
from gpu_workers.media.audio import Samples

# torch.stft reflects half a window at each end, so it wants more samples than that.
_REFLECTED_SAMPLES: Final = 200
# Zeros behind the sound that no valid frame's window reaches beyond, and the least that is worth padding to.
_WINDOW_SAMPLES: Final = 480
_SHORTEST_PADDED_SAMPLES: Final = 16_000


class Whisper:
    """What the ears have in common: a model, and a feature extractor that makes mel spectrograms."""

    max_frames: int | None = None
    min_samples = 1
    mask_name = "input_features_mask"
    frame_axis = 2

    def __init__(self, model: PreTrainedModel, extractor: Any, dim: int) -> None:
        """extractor: a WhisperFeatureExtractor or one like it. dim: elements of a row."""
        self._model = model
        self._extractor = extractor
        self.dim = dim

    def frames(self, samples: int) -> int:
        """A sound that is padded with zeros has every frame that it begins."""
        return -(-samples // int(self._extractor.hop_length))

    @property
    def feature_sizes(self) -> tuple[int | None, ...]:
        """One sound of any length."""
        return (1, int(self._extractor.feature_size), None)

    def kept_frames(self, valid: int) -> int:
        """Those that are sound."""
        return valid

    def batch_key(self, frames: int) -> str:
        """All sounds share a forward."""
        return ""

    def _extract(self, sounds: list[Samples], **options: Any) -> dict[str, torch.Tensor]:
        return dict(
            self._extractor(
                sounds,
                sampling_rate=self._extractor.sampling_rate,
                return_attention_mask=True,
                return_tensors="pt",
                truncation=False,
                **options,
            )
        )

    def _together(self, batch: list[Prepared]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and masks of all sounds on the device, padded to the longest."""
        longest = max(tensor.shape[-1] for tensor in tensors_of(batch, MASK))
        together = [
            torch.cat([_padded(tensor, longest) for tensor in tensors_of(batch, name)])
            for name in (FEATURES, MASK)
        ]
        features, mask = (tensor.to(self._model.device, non_blocking=True) for tensor in together)
        return features.to(self._model.dtype), mask


class Qwen2AudioEar(Whisper):
    """Always thirty seconds of mel frames; the tower takes no other number."""

    mask_name = "feature_attention_mask"

    def __init__(self, model: PreTrainedModel, extractor: Any) -> None:
        super().__init__(model, extractor, model.config.text_config.hidden_size)
        self.max_frames: int = 2 * int(model.config.audio_config.max_source_positions)

    @property
    def feature_sizes(self) -> tuple[int | None, ...]:
        """Thirty seconds."""
        return (1, int(self._extractor.feature_size), self.max_frames)

    def kept_frames(self, valid: int) -> int:
        """All."""
        return self.max_frames

    def rows(self, frames: int) -> int:
        """A convolution of stride two and an average pool of two."""
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (1, mel bins, 3000) and attention_mask (1, 3000)."""
        return self._extract([samples], padding="max_length")

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """As Qwen2AudioModel.forward does it."""
        features, mask = self._together(batch)
        inner = self._model.model
        tower = inner.audio_tower
        lengths, _ = tower._get_feat_extract_output_lengths(mask.sum(-1))
        positions = (features.shape[-1] - 2) // 2 + 1
        is_valid = torch.arange(positions, device=lengths.device)[None] < lengths[:, None]
        attention_mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=features.new_zeros((len(batch), positions, 1)),
            attention_mask=is_valid.long(),
        )
        hidden = tower(features, attention_mask=attention_mask).last_hidden_state
        rows = inner.multi_modal_projector(hidden)
        return [rows[index, : prepared.plan.rows] for index, prepared in enumerate(batch)]


class Qwen25OmniEar(Whisper):
    """Any length; windows of the tower are its own affair."""

    mask_name = "feature_attention_mask"

    def __init__(self, model: PreTrainedModel, extractor: Any) -> None:
        super().__init__(model, extractor, model.config.audio_config.output_dim)

    def rows(self, frames: int) -> int:
        """As Qwen2-Audio."""
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (1, mel bins, frames) and attention_mask (1, frames), valid frames only.

        Hugging Face pads with zeros to five minutes and masks what is not sound. As many zeros as the last
        valid frame sees give the same frames in a fraction of the time.
        """
        whole = int(self._extractor.n_samples)
        seen = max(len(samples) + _WINDOW_SAMPLES, _SHORTEST_PADDED_SAMPLES)
        hop = int(self._extractor.hop_length)
        padded = max(len(samples), min(whole, -(-seen // hop) * hop))
        features = self._extract([samples], padding="max_length", max_length=padded)
        valid = int(features[MASK].sum())
        return {name: features[name][..., :valid] for name in (FEATURES, MASK)}

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_audio_features on all sounds together."""
        features, mask = self._together(batch)
        output = self._model.get_audio_features(input_features=features, feature_attention_mask=mask)
        return split_rows(output.last_hidden_state, batch)


class Qwen3OmniEar(Qwen25OmniEar):
    """Blocks of 100 frames, thirteen rows each."""

    min_samples = _REFLECTED_SAMPLES + 1

    def frames(self, samples: int) -> int:
        """Nothing is padded: a frame that is only begun is dropped."""
        return samples // int(self._extractor.hop_length)

    def rows(self, frames: int) -> int:
        """Three convolutions of stride two over each block."""
        return rows_of_blocks(frames, self._block_frames)

    def batch_key(self, frames: int) -> str:
        """Beside a longer sound one that is shorter than a block would be padded to a whole block, and the
        padding comes through the convolutions: the last row would depend on the batch."""
        return f"audio of {frames} frames" if frames < self._block_frames else ""

    @property
    def _block_frames(self) -> int:
        return 2 * int(self._model.config.audio_config.n_window)

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (1, mel bins, frames) and attention_mask (1, frames)."""
        return self._extract([samples], padding=True)


class Qwen3AsrEar(Whisper):
    """The extractor pads short sound to half a second, which counts as sound, and frames to whole blocks."""

    def __init__(self, model: PreTrainedModel, extractor: Any) -> None:
        super().__init__(model, extractor, model.config.text_config.hidden_size)
        self._n_window = int(model.config.audio_config.n_window)

    def frames(self, samples: int) -> int:
        """A frame that is only begun is dropped."""
        return max(samples, int(self._extractor.min_length)) // int(self._extractor.hop_length)

    def kept_frames(self, valid: int) -> int:
        """Whole blocks."""
        block = 2 * self._n_window
        return -(-valid // block) * block

    def rows(self, frames: int) -> int:
        """As Qwen3-Omni."""
        return rows_of_blocks(frames, 2 * self._n_window)

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (1, mel bins, whole blocks of frames) and attention_mask."""
        return self._extract([samples], padding=True, n_window=self._n_window)

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_audio_features on all sounds together."""
        features, mask = self._together(batch)
        output = self._model.get_audio_features(input_features=features, input_features_mask=mask)
        return split_rows(output.pooler_output, batch)


class GlmAsrEar(Whisper):
    """Windows of thirty seconds, the last one padded; four encoder frames make a row."""

    def __init__(self, model: PreTrainedModel, extractor: Any) -> None:
        super().__init__(model, extractor, model.config.text_config.hidden_size)
        self._window_samples = int(extractor.sampling_rate * extractor.chunk_length)
        self._window_frames = self._window_samples // int(extractor.hop_length)

    @property
    def feature_sizes(self) -> tuple[int | None, ...]:
        """Windows, each of thirty seconds."""
        return (None, int(self._extractor.feature_size), self._window_frames)

    def kept_frames(self, valid: int) -> int:
        """All of a window."""
        return self._window_frames

    def rows(self, frames: int) -> int:
        """Convolutions of stride one and two, then groups of four."""
        return ((frames - 1) // 2 + 1 - 4) // 4 + 1

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (windows, mel bins, 3000) and attention_mask (windows, 3000)."""
        starts = range(0, len(samples), self._window_samples)
        windows = [samples[start : start + self._window_samples] for start in starts]
        return self._extract(windows, padding="max_length")

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_audio_features on the windows of all sounds together."""
        features, mask = self._together(batch)
        output = self._model.get_audio_features(input_features=features, input_features_mask=mask)
        return split_rows(output.pooler_output, batch)


def rows_of_blocks(frames: int, block_frames: int) -> int:
    """Rows of Qwen3's audio tower: thirteen for a whole block of a hundred frames."""
    return frames // block_frames * _halved_thrice(block_frames) + _halved_thrice(frames % block_frames)


def split_rows(rows: torch.Tensor, batch: list[Prepared]) -> list[Rows]:
    """One flat tensor -> the rows of each sound. ValueError if the tower gave another number than planned."""
    return list(torch.split(rows, [prepared.plan.rows for prepared in batch]))


def _halved_thrice(frames: int) -> int:
    for _ in range(3):
        frames = (frames - 1) // 2 + 1 if frames > 0 else 0
    return frames


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor
