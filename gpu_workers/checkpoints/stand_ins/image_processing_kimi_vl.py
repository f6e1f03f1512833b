"""Pictures -> patches of any grid. Takes Pillow's pictures only, as the real one does."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor, BatchFeature


class KimiVLImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """pixel_values (patches, 3, patch, patch) and image_grid_hws (pictures, 2)."""

    model_input_names = ("pixel_values", "image_grid_hws")

    def __init__(
        self,
        patch_size: int = 14,
        pad_input: bool = True,
        in_token_limit: int = 4096,
        merge_kernel_size: tuple[int, int] = (2, 2),
        image_mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        image_std: tuple[float, ...] = (0.5, 0.5, 0.5),
        **kwargs: Any,
    ) -> None:
        """in_token_limit: patches of the largest picture; larger ones shrink."""
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.pad_input = pad_input  # the stand-in always pads
        self.in_token_limit = in_token_limit
        self.merge_kernel_size = list(merge_kernel_size)
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """One picture or a list of them."""
        pictures = images if isinstance(images, list) else [images]
        if not all(isinstance(picture, Image.Image) for picture in pictures):
            raise ValueError("pictures must be PIL.Image.Image")
        patches = [self._patches(self._pixels(picture)) for picture in pictures]
        grids = [grid for _, grid in patches]
        outputs = {
            "pixel_values": torch.cat([one for one, _ in patches]),
            "image_grid_hws": torch.tensor(grids),
        }
        return BatchFeature(data=outputs, tensor_type=return_tensors)

    def _pixels(self, picture: Image.Image) -> torch.Tensor:
        """(3, height, width), padded with black to whole merged patches."""
        width, height = picture.size
        patches = (width // self.patch_size) * (height // self.patch_size)
        if patches > self.in_token_limit:
            scale = (self.in_token_limit / patches) ** 0.5
            width, height = int(width * scale), int(height * scale)
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        down, across = (side * self.patch_size for side in self.merge_kernel_size)
        padded = Image.new("RGB", (-(-width // across) * across, -(-height // down) * down))
        padded.paste(picture.convert("RGB"))
        pixels = torch.from_numpy(np.array(padded)).permute(2, 0, 1) / 255
        return (pixels - torch.tensor(self.image_mean)[:, None, None]) / torch.tensor(self.image_std)[
            :, None, None
        ]

    def _patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        side = self.patch_size
        high, wide = pixels.shape[1] // side, pixels.shape[2] // side
        split = pixels.reshape(3, high, side, wide, side)
        return split.permute(1, 3, 0, 2, 4).reshape(high * wide, 3, side, side), [high, wide]
