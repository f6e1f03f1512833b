"""Videos of families that are Hugging Face's video processor in front and a get_*_features method behind.

Which frames are taken is asked of the processor's own sample_frames, and how large they become of the
processor itself, run on a tensor that has a size and no pixels.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoVideoProcessor

from gpu_workers.errors import ItemError
from gpu_workers.families.base import ItemPlan, MediaItem, Prepared, Rows
from gpu_workers.families.features import FeatureMethod
from gpu_workers.families.options import (
    VisionOptions,
    adjusted,
    daemon_options,
    item_options,
    with_default_sampling,
)
from gpu_workers.families.patches import check_aspect_ratio, patch_count
from gpu_workers.families.plain_pictures import plan_of
from gpu_workers.families.processed import ProcessedLayout, refusals_are_unfit, tensors_among
from gpu_workers.families.qwen_pictures import PROCESSOR_MAX_ASPECT_RATIO, gray_square
from gpu_workers.families.row_rules import RowRule, pixels_of
from gpu_workers.media.image import parse_background
from gpu_workers.media.pixels import device_memory
from gpu_workers.media.video import VideoReader
from gpu_workers.media.video_plan import VideoLimits, VideoMetadata, VideoPlan
from shm.errors import ErrorCode
from shm.messages import ItemAux, WorkerConfig

# What the language model is told of time: of the chosen frames and the processor that chose them.
TimeRule: TypeAlias = Callable[[VideoMetadata, Any], ItemAux]
# The processor's outputs under the names of the method, where they differ.
Adapt: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

_MIN_FRAMES_OF_DAMAGED: Final = 4
# (frames, height, width) of videos whose outputs have in common what is fixed.
_LAYOUT_SIZES: Final = ((2, 56, 56), (8, 448, 224), (13, 224, 448))


def no_times(metadata: VideoMetadata, processor: Any) -> ItemAux:
    """Nothing."""
    return ItemAux()


def first_times(metadata: VideoMetadata, processor: Any) -> ItemAux:
    """When the first frame of each temporal patch (of Kimi: chunk) is shown."""
    first = (metadata.frames_indices or [])[:: processor.temporal_patch_size]
    return ItemAux(video_timestamps=[index / metadata.fps for index in first])


def frames_as_pictures(outputs: dict[str, Any]) -> dict[str, Any]:
    """InternVL encodes each frame as a tile of one picture."""
    return {"pixel_values": outputs["pixel_values_videos"].flatten(0, 1)}


def unchanged(outputs: dict[str, Any]) -> dict[str, Any]:
    """Names are the method's already."""
    return outputs


class VideoSource:
    """The checkpoint's video processor and the reader in front of it. Any number of threads may use it."""

    def __init__(
        self, config: WorkerConfig, device: torch.device, adapt: Adapt = unchanged, least_frames: int = 1
    ) -> None:
        """device: the tower's, where the processor runs if --preprocess-device says so. least_frames: a
        shorter video shows its last frame again. OSError or ValueError if the checkpoint has no video
        processor."""
        known, others = daemon_options("video", config.media_options.video)
        processor = AutoVideoProcessor.from_pretrained(
            config.checkpoint, trust_remote_code=config.trust_remote_code, **others
        )
        self._processor = _for_options(with_default_sampling(processor), known)
        limits = VideoLimits(
            config.max_pixels, min_frames=_MIN_FRAMES_OF_DAMAGED, max_frames=self._processor.max_frames
        )
        background = parse_background(config.rgba_background)
        self._reader = VideoReader(limits, background, config.preprocess_threads)
        self._device = device if config.preprocess_device == "device" else torch.device("cpu")
        self._adapt = adapt
        self._least_frames = least_frames
        self._max_aspect_ratio = min(config.max_aspect_ratio, PROCESSOR_MAX_ASPECT_RATIO)

    @property
    def processor_name(self) -> str:
        """For messages."""
        return type(self._processor).__name__

    def plan(self, item: MediaItem) -> VideoPlan:
        """The frames to take. ItemError."""
        wanted = item_options(item.options)
        if item.kind == "frames":
            video = self._reader.plan_pictures(item.files, _all_frames, wanted.fps)
        else:
            choose = partial(_choose, _for_options(self._processor, wanted))
            video = self._reader.plan(item.data, choose)
        check_aspect_ratio(video.metadata.width, video.metadata.height, self._max_aspect_ratio)
        return video

    def aux(self, video: VideoPlan, rule: TimeRule) -> ItemAux:
        """What rule makes of the chosen frames."""
        return rule(video.metadata, self._processor)

    def process(self, item: MediaItem, video: VideoPlan) -> dict[str, Any]:
        """The outputs for the chosen frames. ItemError."""
        if item.kind == "frames":
            frames = self._reader.rgb_of_pictures(item.files, video)
        else:
            frames = self._reader.rgb(item.data, video)
        with device_memory():
            pixels = torch.from_numpy(frames).to(self._device).permute(0, 3, 1, 2)
            return self.adapted(self._run(pixels, item_options(item.options)))

    def dry_run(self, item: MediaItem, video: VideoPlan) -> dict[str, Any]:
        """The outputs by shape: pixels on the meta device, grids real. ItemError if the processor refuses."""
        frames, height, width, _ = video.shape
        return self.adapted(self._dry_outputs(frames, height, width, item_options(item.options)))

    def adapted(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """A processor's outputs under the names of the method."""
        return self._adapt(outputs)

    def layout(self, names: Iterable[str]) -> ProcessedLayout:
        """Of the processor's own outputs, those that become the method's arguments of these names."""
        outputs = []
        for size in _LAYOUT_SIZES:
            with suppress(ItemError):  # a size that the processor refuses tells nothing
                outputs.append(self._dry_outputs(*size, VisionOptions()))
        wanted = list(names) if self._adapt is unchanged else list(outputs[0])
        return ProcessedLayout([tensors_among(one, wanted) for one in outputs], first_is_free=False)

    def _dry_outputs(self, frames: int, height: int, width: int, wanted: VisionOptions) -> dict[str, Any]:
        nothing = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        try:
            return self._run(nothing, wanted)
        except (ValueError, ZeroDivisionError, RuntimeError):
            raise ItemError(ErrorCode.UNSUPPORTED_FORMAT) from None

    def _run(self, frames: torch.Tensor, wanted: VisionOptions) -> dict[str, Any]:
        if len(frames) < self._least_frames:
            again = frames[-1:].expand(self._least_frames - len(frames), -1, -1, -1)
            frames = torch.cat([frames, again])
        processor = _for_options(self._processor, wanted)
        outputs = processor(
            videos=[frames], do_sample_frames=False, input_data_format="channels_first", return_tensors="pt"
        )
        return dict(outputs)


class PlainVideos:
    """A composed.Part."""

    def __init__(
        self,
        source: VideoSource,
        method: FeatureMethod,
        rule: RowRule,
        dim: int,
        times: TimeRule,
        layout: ProcessedLayout,
    ) -> None:
        """layout: of the processor's outputs."""
        self._source = source
        self._layout = layout
        self._method = method
        self._rule = rule
        self._dim = dim
        self._times = times

    @property
    def dim(self) -> int:
        """As the tower gave it for a sample."""
        return self._dim

    def sample(self) -> MediaItem:
        """Two gray frames."""
        return video_sample()

    def inspect(self, item: MediaItem) -> ItemPlan | None:
        """Processed items and lists of pictures tell; a video file has to be read through."""
        item_options(item.options)
        return None if item.kind == "media" else self.measure(item)

    def measure(self, item: MediaItem) -> ItemPlan:
        """Finds and chooses the frames."""
        if item.kind == "processed":
            outline = self._source.adapted(dict(self._layout.outline(item.data)))
            with refusals_are_unfit():
                return plan_of([self._rule(self._method.arguments(outline))])
        video = self._source.plan(item)
        rows, grids = self._rule(self._method.arguments(self._source.dry_run(item, video)))
        return ItemPlan(
            rows=rows,
            grids=grids,
            width=video.metadata.width,
            height=video.metadata.height,
            cost_patches=patch_count(grids),
            aux=self._source.aux(video, self._times),
            media_plan=video,
        )

    def preprocess(self, item: MediaItem, plan: ItemPlan) -> Prepared:
        """What the method takes, as the processor gives it."""
        arguments = self._method.arguments(self._outputs(item, plan))
        if self._rule(arguments) != (plan.rows, plan.grids):
            raise ItemError(ErrorCode.INTERNAL)
        return Prepared(item.modality, plan, dict(arguments), _batch_key(item, arguments))

    def forward(self, batch: list[Prepared]) -> list[Rows]:
        """All videos by one call."""
        return list(self._method.encode_together(batch))

    def _outputs(self, item: MediaItem, plan: ItemPlan) -> dict[str, Any]:
        if item.kind == "processed":
            return self._source.adapted(dict(self._layout.outputs(item.data)))
        assert isinstance(plan.media_plan, VideoPlan), "measure made it"
        return self._source.process(item, plan.media_plan)


def video_sample() -> MediaItem:
    """Two gray frames."""
    frame = memoryview(gray_square())
    return MediaItem("video", (frame, frame), "frames")


def _batch_key(item: MediaItem, arguments: dict[str, torch.Tensor]) -> str:
    """Videos laid out (1, frames, ...) share a forward only with those of as many frames: padding would be
    encoded too."""
    pixels = pixels_of(arguments)
    return f"{item.modality} of {pixels.shape[1]} frames" if pixels.dim() == 5 else item.modality


def _choose(processor: Any, metadata: VideoMetadata) -> npt.NDArray[np.integer]:
    """The frames that the processor's own rule takes; all of a video that has fewer than it wants, one of a
    video that ends before the rule's first step."""
    wanted = getattr(processor, "num_frames", None)
    count = None if wanted is None else min(wanted, metadata.total_num_frames)
    try:
        return _sampled(processor, metadata, count, getattr(processor, "fps", None))
    except ZeroDivisionError:  # how InternVL's rule ends for a video shorter than 1 / fps
        return _sampled(processor, metadata, 1, None)


def _sampled(
    processor: Any, metadata: VideoMetadata, num_frames: int | None, fps: float | None
) -> npt.NDArray[np.integer]:
    indices = processor.sample_frames(
        metadata=metadata,
        temporal_patch_size=getattr(processor, "temporal_patch_size", None),
        min_frames=processor.min_frames,
        max_frames=processor.max_frames,
        num_frames=num_frames,
        fps=fps,
    )
    return np.asarray(indices)


def _all_frames(metadata: VideoMetadata) -> range:
    """A list of pictures was chosen by the one who sent it."""
    return range(metadata.total_num_frames)


def _for_options(processor: Any, wanted: VisionOptions) -> Any:
    """ItemError(BAD_OPTION) for limits of pixels where the processor counts in another way."""
    if wanted.min_pixels is not None or wanted.max_pixels is not None:
        size = getattr(processor, "size", None) or {}
        if not size.get("shortest_edge") or not size.get("longest_edge"):
            raise ItemError(ErrorCode.BAD_OPTION)
    return adjusted(processor, wanted)
