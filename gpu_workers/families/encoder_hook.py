"""Models that bring a preprocessing of their own for encoder servers, as SGLang's model classes do.

`preprocess_mm_for_encoder(items, modality, vision_config)` gets pictures (PIL, RGB) and sound (float32 at the
model's rate) loaded and videos as files, and gives what get_image_feature(s), get_video_feature(s) and
get_audio_feature(s) take: pixel_values, pixel_values_videos or input_features, and the grids or lengths of
each item. A video's sound is in what it gives under video_audio_*; encode_video_audio makes rows of it, which
follow those of the frames. Each item has a call of its own, one at a time: hooks know of no threads.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from gpu_workers.errors import ConfigurationError, ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.composed import Part
from gpu_workers.families.hook_media import Loaded, Loader, PictureLoader, SoundLoader, VideoLoader
from gpu_workers.families.hook_outputs import RowCounts, aux_of, grids_of_outputs, rows_by_hook
from gpu_workers.families.options import DEFAULT_FPS, DEFAULT_MAX_FRAMES, DEFAULT_MIN_FRAMES
from gpu_workers.families.patches import patch_count
from shm.errors import ErrorCode
from shm.messages import MediaOptions, WorkerConfig

logger = logging.getLogger(__name__)

_HOOK: Final = "preprocess_mm_for_encoder"


class Modality(StrEnum):
    """What hooks are told: equal to the name, and with the members of SGLang's enumeration."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


def has_hook(model: PreTrainedModel) -> bool:
    """Whether the model brings preprocess_mm_for_encoder."""
    return hasattr(model, _HOOK)


def part_loaders(config: WorkerConfig, model: PreTrainedModel) -> dict[str, Callable[[], Part]]:
    """One for each modality that the model has a feature method for. ConfigurationError if it has none."""
    media: dict[Modality, Callable[[], Loader]] = {
        Modality.IMAGE: partial(PictureLoader, config),
        Modality.VIDEO: partial(VideoLoader, config),
        Modality.AUDIO: partial(SoundLoader, config, model),
    }
    hook = Hook(model, vision_config(config.media_options))
    loaders: dict[str, Callable[[], Part]] = {}
    for modality, loader in media.items():
        names = [name for name in _method_names(modality) if hasattr(model, name)]
        if names:
            loaders[modality.value] = partial(_load_part, hook, modality, names[0], loader)
    if not loaders:
        raise ConfigurationError(f"{type(model).__name__} has {_HOOK} and none of its get_*_feature methods")
    return loaders


def vision_config(options: MediaOptions) -> dict[str, dict[str, Any]]:
    """--mm-process-config as hooks get it, with SGLang's defaults."""
    defaults = {"fps": DEFAULT_FPS, "max_frames": DEFAULT_MAX_FRAMES, "min_frames": DEFAULT_MIN_FRAMES}
    return {
        "image": dict(options.image),
        "video": defaults | options.video,
        "audio": {"return_attention_mask": True, "padding": True} | options.audio,
    }


class Hook:
    """The model's preprocessing. Safe for several threads, which take turns."""

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any]) -> None:
        self.model = model
        self._config = config
        self._turn = threading.Lock()

    def outputs(self, loaded: Loaded, modality: Modality) -> dict[str, Any]:
        """What the hook gives for one item."""
        with self._turn, torch.inference_mode():
            return dict(getattr(self.model, _HOOK)(loaded.values, modality, self._config))


class HookedPart:
    """A composed.Part."""

    def __init__(self, hook: Hook, modality: Modality, method: str, loader: Loader) -> None:
        """method: of the model. ConfigurationError if what the hook gives does not fit it."""
        self._hook = hook
        self._modality = modality
        self._loader = loader
        self._encode = rows_by_hook(hook.model, method)
        outputs = hook.outputs(loader.load(loader.sample()), modality)
        rows = self._encode([outputs])[0]
        self._counts = RowCounts(hook.model, modality, outputs, len(rows))
        self._dim = int(rows.shape[-1])

    @property
    def dim(self) -> int:
        """As the tower gave it for a sample."""
        return self._dim

    def sample(self) -> MediaItem:
        """The loader's."""
        return self._loader.sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Never: only the hook knows. ItemError for an item whose header refuses."""
        self._loader.check(item)
        return None

    def measure(self, item: MediaItem) -> ItemPlan:
        """By the hook; its outputs are kept for the forward."""
        loaded = self._loader.load(item)
        outputs = self._outputs(loaded)
        grids = grids_of_outputs(outputs, self._modality)
        sound_rows = self._counts.of_sound(outputs)
        rows = self._counts.of_media(outputs) + sound_rows
        if rows < 1:
            raise ItemError(ErrorCode.TOO_SHORT, loaded.length, loaded.length + 1)
        return ItemPlan(
            rows=rows,
            grids=grids,
            width=loaded.width,
            height=loaded.height,
            cost_patches=patch_count(grids) + sound_rows,
            aux=aux_of(outputs, self._modality, with_sound=self._counts.takes_sound),
            media_plan=outputs,
        )

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """Done already."""
        return Prepared(item.modality, plan)

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """The frames of all items, then the sound of each."""
        all_outputs = [_kept(prepared) for prepared in batch]
        with torch.inference_mode():
            tables = self._encode(all_outputs)
            return [
                self._with_sound(table, outputs) for table, outputs in zip(tables, all_outputs, strict=True)
            ]

    def _outputs(self, loaded: Loaded) -> dict[str, Any]:
        try:
            return self._hook.outputs(loaded, self._modality)
        except Exception as error:  # the model's own decoder meets foreign bytes: it may raise anything
            logger.warning("%s refused an item", _HOOK, exc_info=True)
            code = (
                ErrorCode.DECODE_FAILED if self._modality is Modality.VIDEO else ErrorCode.UNSUPPORTED_FORMAT
            )
            raise ItemError(code) from error

    def _with_sound(self, table: torch.Tensor, outputs: dict[str, Any]) -> torch.Tensor:
        if self._counts.of_sound(outputs) == 0:
            return table
        sound = self._hook.model.encode_video_audio(outputs)
        return torch.cat([table, sound.reshape(-1, sound.shape[-1]).to(table)])


def _load_part(hook: Hook, modality: Modality, method: str, loader: Callable[[], Loader]) -> Part:
    """ValueError if the hook does not take the modality."""
    try:
        return HookedPart(hook, modality, method, loader())
    # What a class raises that has the method's name and not this modality, or wants what no processor gives:
    # the other modalities are served all the same.
    except (NotImplementedError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{_HOOK} or {method} failed on a sample: {type(error).__name__}: {error}"
        ) from error


def _method_names(modality: Modality) -> tuple[str, str]:
    """Hugging Face's, then SGLang's."""
    return f"get_{modality.value}_features", f"get_{modality.value}_feature"


def _kept(prepared: Prepared) -> dict[str, Any]:
    outputs = prepared.plan.media_plan
    assert isinstance(outputs, dict), "measure made it"
    return outputs
