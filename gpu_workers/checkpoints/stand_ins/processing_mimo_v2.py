"""Media -> what the towers of modeling_mimo_v2.py take, under the names of the real model's processor."""

import io
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch.nn import functional

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_FFT_SAMPLES = 960
_HOP_SAMPLES = 240


class MiMoV2EncoderProcessor:
    """Called with all items of one modality; keeps the options that it was made with."""

    def __init__(self, config: Any, mm_config: dict[str, Any]) -> None:
        """mm_config: options for "image", "video" and "audio"."""
        vision, audio, own = config.vision_config, config.audio_config, config.processor_config or {}
        self.patch = vision["patch_size"]
        self.merge = vision["spatial_merge_size"]
        self.temporal = vision["temporal_patch_size"]
        self.rate = own.get("audio_sampling_rate", 24_000)
        self.mels, self.group = audio["n_mels"], audio["group_size"]
        self.max_pixels = mm_config["image"].get("max_pixels", own.get("image_max_pixels", 50_176))
        self.fps = mm_config["video"].get("fps", 2.0)
        self.min_frames = mm_config["video"].get("min_frames", 4)
        self.max_frames = mm_config["video"].get("max_frames", 768)

    def __call__(self, mm_data: list[Any], modality: Any) -> dict[str, Any]:
        """Outputs as the towers want them, and the grids or lengths of each item."""
        if modality == "image":
            return self._pictures(mm_data)
        if modality == "video":
            return self._videos(mm_data)
        spectra = [self._spectra(samples) for samples in mm_data]
        lengths = torch.tensor([len(one) // self.group for one in spectra])
        return {"input_features": spectra, "audio_feature_lens_raw": lengths}

    def _pictures(self, pictures: list[Image.Image]) -> dict[str, Any]:
        flat = [self._patches(self._pixels([picture] * self.temporal)) for picture in pictures]
        return {
            "pixel_values": torch.cat([patches for patches, _ in flat]),
            "image_grid_thw": torch.tensor([grid for _, grid in flat]),
        }

    def _videos(self, files: list[bytes]) -> dict[str, Any]:
        patches, grids, times, sounds = [], [], [], []
        starts: list[int] = []
        lengths: list[int] = []
        units: list[int] = []
        for file in files:
            frames, shown_s = self._frames(file)
            values, grid = self._patches(self._pixels(frames))
            patches.append(values)
            grids.append(grid)
            first_s = shown_s[:: self.temporal]
            times += first_s
            samples = self._track(file)
            units.append(0 if samples is None else len(first_s))
            if samples is not None:
                sounds.append(self._spectra(samples))
                segments = self._segments(first_s, shown_s, len(sounds[-1]) // self.group)
                starts += [start for start, _ in segments]
                lengths += [length for _, length in segments]
        outputs: dict[str, Any] = {
            "pixel_values_videos": torch.cat(patches),
            "video_grid_thw": torch.tensor(grids),
            "video_timestamps": times,
        }
        if sounds:
            outputs["video_audio_features"] = sounds
            outputs["video_audio_feature_lens"] = torch.tensor([len(one) // self.group for one in sounds])
            outputs["video_audio_segment_lens_flat"] = lengths
            outputs["video_audio_segment_starts_flat"] = starts
            outputs["video_audio_per_video_num_units"] = units
        return outputs

    def _segments(self, first_s: list[float], shown_s: list[float], rows: int) -> list[tuple[int, int]]:
        """(start, length) of the rows of sound that each temporal patch hears."""
        rows_of_second = self.rate / (_HOP_SAMPLES * self.group)
        step_s = shown_s[1] - shown_s[0] if len(shown_s) > 1 else 1.0
        ends = [*first_s[1:], shown_s[-1] + step_s]
        bounds = [
            (min(int(begin * rows_of_second), rows), min(int(end * rows_of_second), rows))
            for begin, end in zip(first_s, ends, strict=True)
        ]
        return [(begin, max(end - begin, 0)) for begin, end in bounds]

    def _frames(self, file: bytes) -> tuple[list[Image.Image], list[float]]:
        """Frames at an even distance and when they are shown; the last one again to fill a temporal patch."""
        with av.open(io.BytesIO(file), "r") as container:
            fps = float(container.streams.video[0].average_rate or 24)
            decoded = [
                Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)
            ]
        wanted = min(
            max(round(len(decoded) / fps * self.fps), self.min_frames), self.max_frames, len(decoded)
        )
        chosen = np.unique(np.linspace(0, len(decoded) - 1, wanted, dtype=np.int64)).tolist()
        chosen += [chosen[-1]] * (-len(chosen) % self.temporal)
        return [decoded[index] for index in chosen], [index / fps for index in chosen]

    def _track(self, file: bytes) -> Any:
        """Mono samples of the first audio track; None without one."""
        with av.open(io.BytesIO(file), "r") as container:
            if not container.streams.audio:
                return None
            resampler = av.AudioResampler(format="flt", layout="mono", rate=self.rate)
            blocks = [
                block.to_ndarray()[0]
                for frame in container.decode(audio=0)
                for block in resampler.resample(frame)
            ]
            blocks += [block.to_ndarray()[0] for block in resampler.resample(None)]
        return np.concatenate(blocks)

    def _spectra(self, samples: Any) -> torch.Tensor:
        """(frames, mels), whole groups; sound is filled up with silence."""
        filled = -(-len(samples) // (_HOP_SAMPLES * self.group)) * _HOP_SAMPLES * self.group
        sound = functional.pad(torch.from_numpy(samples).float(), (0, filled - len(samples) + _FFT_SAMPLES))
        windows = sound.unfold(0, _FFT_SAMPLES, _HOP_SAMPLES)[: filled // _HOP_SAMPLES]
        power = torch.fft.rfft(windows * torch.hann_window(_FFT_SAMPLES)).abs()[:, : self.mels]
        return torch.log(power.clamp(min=1e-5))

    def _pixels(self, frames: list[Image.Image]) -> torch.Tensor:
        """(frames, 3, height, width), sides in whole merged patches."""
        side = self.patch * self.merge
        width, height = frames[0].size
        scale = min(1.0, (self.max_pixels / (width * height)) ** 0.5)
        size = tuple(max(side, round(length * scale / side) * side) for length in (width, height))
        resized = [
            np.asarray(frame.convert("RGB").resize(size, Image.Resampling.BICUBIC)) for frame in frames
        ]
        pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2) / 255
        return (pixels - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]

    def _patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Flat patches, those of one row of the answer together, and their grid."""
        count, _, height, width = pixels.shape
        grid = [count // self.temporal, height // self.patch, width // self.patch]
        time, high, wide = grid
        split = pixels.reshape(
            time, self.temporal, 3, high // self.merge, self.merge, self.patch,
            wide // self.merge, self.merge, self.patch,
        )  # fmt: skip
        ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(time * high * wide, -1), grid
