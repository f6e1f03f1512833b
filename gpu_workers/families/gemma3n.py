"""Gemma 3n's sound: USM's mel frames, a conformer, and the embedder behind it.

The reference is what the model puts where a prompt's audio tokens stand: get_audio_features, then the
embedding of the last audio token up to audio_soft_tokens_per_image rows. Sound is not cut at thirty seconds:
longer sound has more rows.

The model's pictures want timm, which encoderd does not; its sound is loaded without its eyes.
"""

import logging
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from gpu_workers.families.base import Prepared, Rows
from gpu_workers.families.composed import ComposedFamily, compose, tensors_of
from gpu_workers.families.processed_sound import FEATURES, MASK
from gpu_workers.families.speech import load_sounds
from gpu_workers.media.audio import Samples
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's ears and feature extractor. ConfigurationError for one that cannot work."""
    model = load_towers(
        without_eyes(),
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    del model.model.embed_vision
    logger.warning("image is not served: of gemma3n encoderd knows the sound alone")
    return compose(model, model_type, {"audio": lambda: load_sounds(config, model, Gemma3nEar)})


def without_eyes() -> type[PreTrainedModel]:
    """The model's class, with a constructor that leaves out the vision tower and nothing else."""
    from transformers.models.gemma3n import modeling_gemma3n as code  # here, because it takes seconds

    class EyelessModel(code.Gemma3nModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super(code.Gemma3nModel, self).__init__(config)
            self.vocab_size = config.text_config.vocab_size
            self.language_model = AutoModel.from_config(config.text_config)
            self.vocab_size_per_layer_input = config.text_config.vocab_size_per_layer_input
            self.audio_tower = AutoModel.from_config(config.audio_config)
            self.embed_vision = code.Gemma3nMultimodalEmbedder(config.vision_config, config.text_config)
            self.embed_audio = code.Gemma3nMultimodalEmbedder(config.audio_config, config.text_config)
            self.post_init()

    class Gemma3nForConditionalGeneration(code.Gemma3nForConditionalGeneration):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super(code.Gemma3nForConditionalGeneration, self).__init__(config)
            self.model = EyelessModel(config)
            self.lm_head = torch.nn.Linear(
                config.text_config.hidden_size, config.text_config.vocab_size, bias=False
            )
            self.post_init()

    Gemma3nForConditionalGeneration.__module__ = code.__name__
    return Gemma3nForConditionalGeneration


class Gemma3nEar:
    """A sound.Ear. Frames lie before mel bins here."""

    max_frames: int | None = None
    mask_name = "input_features_mask"
    frame_axis = 1

    def __init__(self, model: PreTrainedModel, extractor: Any) -> None:
        """extractor: a Gemma3nAudioFeatureExtractor."""
        self._model = model
        self._extractor = extractor
        self._least_rows = int(model.config.audio_soft_tokens_per_image)
        self._padded_to = 128  # samples, by the extractor's default
        self.dim: int = model.config.text_config.hidden_size

    @property
    def min_samples(self) -> int:
        """A frame sees one sample before its window."""
        return int(self._extractor.frame_length) + 1

    @property
    def feature_sizes(self) -> tuple[int | None, ...]:
        """One sound of any length."""
        return (1, None, int(self._extractor.feature_size))

    def frames(self, samples: int) -> int:
        """Whole windows of the padded sound that begin within the sound."""
        padded = -(-samples // self._padded_to) * self._padded_to
        hop = int(self._extractor.hop_length)
        return min(-(-samples // hop), (padded - self.min_samples) // hop + 1)

    def kept_frames(self, valid: int) -> int:
        """Those that are sound."""
        return valid

    def rows(self, frames: int) -> int:
        """Of the conformer, or of the prompt where those are more."""
        return max(self._rows_of_conformer(frames), self._least_rows)

    def batch_key(self, frames: int) -> str:
        """Sounds of one length: the tower sees padding where the convolutions reach into it."""
        return f"audio of {frames} frames"

    def features(self, samples: Samples) -> dict[str, torch.Tensor]:
        """input_features (1, frames, mel bins) and attention_mask (1, frames)."""
        outputs = self._extractor(
            [samples], truncation=False, return_attention_mask=True, return_tensors="pt"
        )
        kept = self.frames(len(samples))
        return {FEATURES: outputs[FEATURES][:, :kept], MASK: outputs[self.mask_name][:, :kept]}

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """As Gemma3nModel.forward does it, whose mask is true where there is no sound."""
        inner, device = self._model.model, self._model.device
        features = torch.cat(tensors_of(batch, FEATURES)).to(device, self._model.dtype)
        mask = torch.cat(tensors_of(batch, MASK)).to(device).bool()
        output = inner.get_audio_features(features, ~mask)
        last_token = torch.tensor([[inner.vocab_size - 1]], device=device)
        silence = inner.embed_audio(input_ids=last_token)
        rows = torch.where(output.audio_mel_mask.unsqueeze(-1), silence, output.pooler_output)
        missing = self._least_rows - rows.shape[1]
        if missing > 0:
            rows = torch.cat((rows, silence.expand(len(rows), missing, -1)), dim=1)
        return list(rows)

    def _rows_of_conformer(self, frames: int) -> int:
        """Convolutions whose last window is padded, then every so many of their frames."""
        audio_config = self._model.config.audio_config
        for stride, _ in audio_config.sscp_conv_stride_size:
            frames = (frames - 1) // stride + 1
        return -(-frames // int(audio_config.conf_reduction_factor))
