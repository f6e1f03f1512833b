"""Sound of a model that nobody registered: its processor in front, get_audio_features behind, rows by trial.

The processor is asked as its own __call__ asks it: windows, padding and names are its affair; truncation is
off.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from transformers import AutoFeatureExtractor, AutoProcessor, PreTrainedModel, ProcessorMixin

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.composed import only_media
from gpu_workers.families.features import FeatureMethod, Tensors
from gpu_workers.families.processed import ProcessedLayout, tensors_among, unfit
from gpu_workers.families.sound import MAX_SECONDS, choose_rate, silence
from gpu_workers.families.speech import check_has_extractor
from gpu_workers.media.audio import AudioReader, Samples
from shm.errors import ErrorCode
from shm.messages import ItemAux, WorkerConfig

logger = logging.getLogger(__name__)

RowCount: TypeAlias = Callable[[Tensors], int]

_SAMPLE_SECONDS: Final = 1
# Seconds of sounds whose outputs have in common what is fixed; more than any model's window at the end.
_LAYOUT_SECONDS: Final = (1.0, 2.5, 31.0)
# What towers and extractors raise for a length that they do not take.
_REFUSALS: Final = (ValueError, TypeError, IndexError, RuntimeError)


class SoundSource:
    """The checkpoint's audio processor and the reader in front of it. Any number of threads may use it."""

    def __init__(self, config: WorkerConfig, model: PreTrainedModel) -> None:
        """OSError or ValueError if the checkpoint has no audio processor that can be loaded here."""
        options = dict(config.media_options.audio)
        self._processor = _load_processor(config)
        self._extractor = getattr(self._processor, "_audio_processor", self._processor)
        self.rate = choose_rate(options, self._extractor, getattr(model.config, "audio_config", None))
        options.pop("sampling_rate", None)
        self._options = {
            "sampling_rate": self.rate,
            "return_attention_mask": True,
            "truncation": False,
            **options,
        }
        self._reader = AudioReader(MAX_SECONDS)

    @property
    def processor_name(self) -> str:
        """For messages."""
        return type(self._processor).__name__

    @property
    def mel_bins(self) -> int:
        """Numbers of one frame."""
        return int(getattr(self._extractor, "feature_size", 1))

    def samples(self, item: MediaItem) -> Samples:
        """The whole sound. ItemError."""
        return self._reader.samples(only_media(item), self.rate)

    def process(self, samples: Samples) -> dict[str, Any]:
        """The processor's outputs for one sound. ItemError for one that it refuses."""
        try:
            return self._outputs(samples)
        except _REFUSALS:
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None

    def sample(self) -> MediaItem:
        """A second of silence."""
        return MediaItem("audio", (memoryview(silence(_SAMPLE_SECONDS * self.rate, self.rate)),))

    def process_sample(self) -> dict[str, Any]:
        """The outputs for the sample. ConfigurationError that says what the processor raises."""
        try:
            return self._outputs(self.samples(self.sample()))
        except _REFUSALS as error:
            raise ConfigurationError(
                f"{self.processor_name} gives nothing for a sound: {_said(error)}"
            ) from error

    def layout(self, names: list[str]) -> ProcessedLayout:
        """Of the outputs of these names."""
        outputs = []
        for seconds in _LAYOUT_SECONDS:
            try:
                outputs.append(self._outputs(np.zeros(round(seconds * self.rate), np.float32)))
            except _REFUSALS:
                logger.info("sound of %g s is refused by %s", seconds, self.processor_name)
        return ProcessedLayout([tensors_among(one, names) for one in outputs], first_is_free=False)

    def _outputs(self, samples: Samples) -> dict[str, Any]:
        if self._processor is self._extractor:
            return dict(self._extractor([samples], return_tensors="pt", **self._options))
        tokenizer = getattr(self._processor, "tokenizer", None)
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=getattr(tokenizer, "init_kwargs", {}),
            return_tensors="pt",
            audio_kwargs=self._options,
        )
        options = merged["audio_kwargs"]
        if type(self._processor)._process_audio is ProcessorMixin._process_audio:
            return dict(self._extractor([samples], **options))
        outputs, _ = self._processor._process_audio([samples], **options)
        return dict(outputs)


class TriedSounds:
    """A composed.Part."""

    def __init__(
        self, source: SoundSource, method: FeatureMethod, rows_of: RowCount, dim: int, layout: ProcessedLayout
    ) -> None:
        """rows_of: by trial, of real tensors. layout: of the outputs that the method takes."""
        self._source = source
        self._method = method
        self._rows_of = rows_of
        self._dim = dim
        self._layout = layout

    @property
    def dim(self) -> int:
        """As the tower gave it for a sample."""
        return self._dim

    def sample(self) -> MediaItem:
        """A second of silence."""
        return self._source.sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Never: a trial is nothing to wait for."""
        return None

    def measure(self, item: MediaItem) -> ItemPlan:
        """By processing, and a trial where needed."""
        if item.kind == "processed":
            outputs, too_short, refusal = self._layout.outputs(item.data), unfit(), unfit()
        else:
            samples = self._source.samples(item)
            outputs = self._source.process(samples)
            too_short = ItemError(ErrorCode.TOO_SHORT, len(samples), len(samples) + 1)
            refusal = ItemError(ErrorCode.UNSUPPORTED_FORMAT)
        arguments = self._method.arguments(outputs)
        try:
            rows = self._rows_of(arguments)
        except _REFUSALS:
            raise refusal from None
        if rows == 0:
            raise too_short
        frames = frames_of(arguments, self._source.mel_bins)
        aux = ItemAux(audio_feature_length=frames)
        return ItemPlan(rows, [[frames]], 0, 0, frames, aux=aux, media_plan=arguments)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """What the method takes, as measuring found it."""
        arguments: Any = plan.media_plan
        return Prepared(item.modality, plan, dict(arguments))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """One call for each item."""
        return list(self._method.encode_singly(batch))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def frames_of(arguments: Tensors, mel_bins: int) -> int:
    """Mel frames that are sound, by the mask if there is one."""
    for name, tensor in arguments.items():
        if name.endswith("mask"):
            return int(tensor.sum())
    largest: int = max(tensor.numel() for tensor in arguments.values())
    return largest // mel_bins


def _load_processor(config: WorkerConfig) -> Any:
    """The whole processor, or the feature extractor where that is all there is."""
    trusted = {"trust_remote_code": config.trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(config.checkpoint, **trusted)
    except (OSError, ValueError, ImportError) as error:  # no tokenizer, most often, which sound does not need
        logger.info("the checkpoint has no whole processor: %s", _said(error))
        processor = None
    if getattr(processor, "_audio_processor", None) is not None:
        return processor
    check_has_extractor(config.checkpoint)
    try:
        return AutoFeatureExtractor.from_pretrained(config.checkpoint, **trusted)
    except ImportError as error:  # a library that this extractor wants
        raise ValueError(" ".join(str(error).split())) from None
