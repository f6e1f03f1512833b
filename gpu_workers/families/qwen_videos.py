"""Videos of the Qwen families: Qwen2VLVideoProcessor or Qwen3VLVideoProcessor, get_video_features behind.

Which frames are taken and how large they become is asked of Hugging Face's processor itself: sample_frames
for the first, and resize, on a tensor without data, for the second.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoVideoProcessor, PreTrainedModel

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.options import (
    adjusted,
    daemon_options,
    item_options,
    with_default_sampling,
)
from gpu_workers.families.patches import (
    check_aspect_ratio,
    encode_patches,
    patch_count,
    patch_width,
    processed_grids,
    processed_pixels,
    row_width,
)
from gpu_workers.families.qwen_pictures import PROCESSOR_MAX_ASPECT_RATIO, gray_square
from gpu_workers.media.image import RgbPixels, parse_background
from gpu_workers.media.pixels import Pixels, open_pixels
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits, VideoMetadata, VideoPlan
from shm.errors import ErrorCode
from shm.messages import ItemAux, WorkerConfig

_NAMES: Final = ("pixel_values_videos", "video_grid_thw")
_MIN_FRAMES_OF_DAMAGED: Final = 4

# What the family tells of time: of the chosen frames and the processor that chose them.
AuxRule = Callable[[VideoMetadata, Any], ItemAux]


def no_aux(metadata: VideoMetadata, processor: Any) -> ItemAux:
    """Qwen2-VL: nothing."""
    return ItemAux()


def seconds_of_sampled_rate(metadata: VideoMetadata, processor: Any) -> ItemAux:
    """Qwen2.5-VL: temporal_patch_size / the rate of the frames that were chosen."""
    chosen = len(metadata.frames_indices or [])
    sampled_fps = chosen / metadata.total_num_frames * metadata.fps
    return ItemAux(second_per_grid_ts=processor.temporal_patch_size / sampled_fps)


def seconds_of_wanted_rate(default_fps: float) -> AuxRule:
    """The Omni families: temporal_patch_size / the rate that was asked for; default_fps if none was."""

    def aux(metadata: VideoMetadata, processor: Any) -> ItemAux:
        return ItemAux(second_per_grid_ts=processor.temporal_patch_size / (processor.fps or default_fps))

    return aux


def timestamps(metadata: VideoMetadata, processor: Any) -> ItemAux:
    """Qwen3-VL: the mean of the first and last frame's time of each temporal patch.

    An odd last frame counts twice, as it does in the pixels.
    """
    size = processor.temporal_patch_size
    indices = list(metadata.frames_indices or [])
    indices += [indices[-1]] * (-len(indices) % size)
    times_s = [index / metadata.fps for index in indices]
    middles = [(times_s[first] + times_s[first + size - 1]) / 2 for first in range(0, len(times_s), size)]
    return ItemAux(video_timestamps=middles)


def load_videos(config: WorkerConfig, model: PreTrainedModel, aux_rule: AuxRule) -> "QwenVideos":
    """The checkpoint's videos. OSError or ValueError if it has no video processor."""
    known, others = daemon_options("video", config.media_options.video)
    # Said, or the processors warn of a default that is going to change.
    others = {"cap_pixels_per_frame": False, **others}
    processor = AutoVideoProcessor.from_pretrained(
        config.checkpoint, trust_remote_code=config.trust_remote_code, **others
    )
    processor = adjusted(with_default_sampling(processor), known)
    limits = VideoLimits(
        config.max_pixels, min_frames=_MIN_FRAMES_OF_DAMAGED, max_frames=processor.max_frames
    )
    reader = VideoReader(limits, parse_background(config.rgba_background), config.preprocess_threads)
    pixels = open_pixels(processor, dtype=model.dtype, device=model.device, where=config.preprocess_device)
    return QwenVideos(model, processor, pixels, reader, aux_rule, config.max_aspect_ratio, config.max_pixels)


@dataclass(frozen=True, slots=True)
class _Found:
    """What measuring a video found: its frames, and the size to which they are brought."""

    video: VideoPlan
    height: int
    width: int


class QwenVideos:
    """A composed.Part."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any,
        pixels: Pixels,
        reader: VideoReader,
        aux_rule: AuxRule,
        max_aspect_ratio: int,
        max_pixels: int,
    ) -> None:
        """processor: with the daemon's options. pixels: its arithmetic. max_aspect_ratio: longer to shorter
        side. max_pixels: of one frame, whatever an item's options ask for."""
        self._model = model
        self._processor = processor
        self._pixels = pixels
        self._reader = reader
        self._aux_rule = aux_rule
        self._max_aspect_ratio = min(max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)
        self._max_pixels = max_pixels

    @property
    def dim(self) -> int:
        """With all DeepStack columns."""
        return row_width(self._model.config.vision_config)

    def sample(self) -> MediaItem:
        """Two gray frames."""
        frame = memoryview(gray_square())
        return MediaItem("video", (frame, frame), "frames")

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Processed items and lists of pictures tell; a video file has to be read through."""
        item_options(item.options)
        return None if item.kind == "media" else self.measure(item)

    def measure(self, item: MediaItem) -> ItemPlan:
        """Finds and chooses the frames."""
        if item.kind == "processed":
            return self._processed_plan(item)
        processor = self._for_item(item.options)
        if item.kind == "frames":
            fps = item_options(item.options).fps
            video = self._reader.plan_pictures(item.files, _all_frames, fps)
        else:
            video = self._reader.plan(item.data, partial(_choose, processor))
        return self._plan(video, processor)

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """pixel_values_videos (patches, channels * temporal * patch * patch) and video_grid_thw (1, 3)."""
        if item.kind == "processed":
            features = processed_pixels(item, _NAMES, patch_width(self._processor))
        else:
            assert isinstance(plan.media_plan, _Found), "measure made it"
            pixels = self._process(item, plan.media_plan)
            features = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(plan.grids)}
        return Prepared(item.modality, plan, {**features})

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """get_video_features on all videos together."""
        return encode_patches(self._model, self._model.get_video_features, batch, _NAMES)

    def _for_item(self, options: Mapping[str, Any]) -> Any:
        return adjusted(self._processor, item_options(options))

    def _plan(self, video: VideoPlan, processor: Any) -> ItemPlan:
        frames, height, width, _ = video.shape
        check_aspect_ratio(width, height, self._max_aspect_ratio)
        resized = _resized(processor, frames, height, width)
        if resized[0] * resized[1] > self._max_pixels:
            raise ItemError(ErrorCode.BAD_OPTION)
        grid = [
            -(-frames // processor.temporal_patch_size),
            resized[0] // processor.patch_size,
            resized[1] // processor.patch_size,
        ]
        return ItemPlan(
            rows=patch_count([grid]) // processor.merge_size**2,
            grids=[grid],
            width=width,
            height=height,
            cost_patches=patch_count([grid]),
            aux=self._aux_rule(video.metadata, processor),
            media_plan=_Found(video, *resized),
        )

    def _processed_plan(self, item: MediaItem) -> ItemPlan:
        grids = processed_grids(item, _NAMES, self._processor)
        patches = patch_count(grids)
        return ItemPlan(patches // self._processor.merge_size**2, grids, 0, 0, patches)

    def _process(self, item: MediaItem, found: _Found) -> torch.Tensor:
        """Hugging Face resizes all frames at once, to the same values."""
        frames = self._frames(item, found.video)
        return self._pixels.pixel_values_of(frames, found.video.shape[0], found.height, found.width)

    def _frames(self, item: MediaItem, video: VideoPlan) -> Iterator[tuple[int, RgbPixels]]:
        if item.kind == "frames":
            return enumerate(self._reader.rgb_of_pictures(item.files, video))
        return self._reader.each(item.data, video)


def _choose(processor: Any, metadata: VideoMetadata) -> npt.NDArray[np.integer]:
    """The frames that the processor's own rule takes."""
    indices = processor.sample_frames(
        metadata=metadata,
        temporal_patch_size=processor.temporal_patch_size,
        min_frames=processor.min_frames,
        max_frames=processor.max_frames,
        num_frames=processor.num_frames,
        fps=processor.fps,
    )
    return np.asarray(indices)


def _all_frames(metadata: VideoMetadata) -> range:
    """A list of pictures was chosen by the one who sent it."""
    return range(metadata.total_num_frames)


def _resized(processor: Any, frames: int, height: int, width: int) -> tuple[int, int]:
    """(height, width) that the processor gives frames of this size. ItemError for what it refuses."""
    padded = max(frames, processor.temporal_patch_size)
    video = torch.empty((1, padded, 3, height, width), dtype=torch.uint8, device="meta")
    try:
        resized = processor.resize(
            video,
            size=processor.size,
            resample=processor.resample,
            factor=processor.patch_size * processor.merge_size,
            temporal_factor=processor.temporal_patch_size,
            cap_pixels_per_frame=processor.cap_pixels_per_frame,
        )
    except ValueError:
        raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None
    return resized.shape[-2], resized.shape[-1]
