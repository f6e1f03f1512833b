"""The rows that a worker leaves in its segment against the tower in float64."""

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.bench.photographs import photograph
from tests.gpu.checkpoint import load_tower, rows_of
from tests.gpu.driver import Driver
from tests.gpu.scale import Scale, TowerShape

# The worker may be as far from float64 as the bare tower in its own dtype, and a little.
_ALLOWED_TIMES = 1.25
_FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-3}


class Numbers(NamedTuple):
    """Distances from float64, as a share of the reference's length."""

    worker: float
    hugging_face: float

    def check(self, dtype: torch.dtype, what: str) -> None:
        """AssertionError if the worker's rows are further off than the tower's own."""
        allowed = _ALLOWED_TIMES * self.hugging_face + _FLOOR[dtype]
        assert self.worker <= allowed, f"{what} in {dtype}: {self.worker} from float64, allowed {allowed}"


class Reference:
    """One picture's rows in float64, and what the bare tower says in other types."""

    def __init__(self, shape: TowerShape, checkpoint: Path, scale: Scale) -> None:
        self.picture = photograph(*next(iter(scale.pictures.values())), seed=1)
        self._shape, self._checkpoint, self._device = shape, checkpoint, scale.torch_device
        processor = AutoImageProcessor.from_pretrained(checkpoint)
        rgb = Image.open(BytesIO(self.picture)).convert("RGB")
        self._inputs = processor(images=[rgb], return_tensors="pt")
        self._rows = self.tower_rows(torch.float64)

    def tower_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """(rows, dim) by the bare tower in dtype, on the CPU afterwards."""
        loaded_as = torch.float32 if dtype == torch.float64 else dtype  # the checkpoint's weights, widened
        model = load_tower(self._shape, self._checkpoint, loaded_as, self._device).to(dtype)
        with torch.inference_mode():
            output = model.get_image_features(
                pixel_values=self._inputs["pixel_values"].to(self._device, dtype),
                image_grid_thw=self._inputs["image_grid_thw"].to(self._device),
            )
            return rows_of(output).cpu()

    def compare(self, driver: Driver, dtype: torch.dtype) -> Numbers:
        """The worker behind driver, and the bare tower in the same dtype."""
        return Numbers(
            self._distance(driver.tensor_of(self.picture)), self._distance(self.tower_rows(dtype))
        )  # fmt: skip

    def _distance(self, rows: torch.Tensor) -> float:
        assert rows.shape == self._rows.shape, (rows.shape, self._rows.shape)
        assert bool(torch.isfinite(rows).all()), "rows that are not finite"
        return float((rows.double() - self._rows).norm() / self._rows.norm())
