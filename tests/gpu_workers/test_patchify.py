"""gpu_workers._pixels alone, beside numpy. Also run with the extension built for the sanitizers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_workers import _pixels


def reference(
    frames: npt.NDArray[np.uint8], table: npt.NDArray[Any], patch: int, merge: int, temporal: int
) -> npt.NDArray[Any]:
    """(steps * grid_h * grid_w, 3 * temporal * patch * patch), by numpy."""
    missing = -len(frames) % temporal
    complete = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    values = np.stack([table[channel][complete[..., channel]] for channel in range(3)])
    _, count, height, width = values.shape
    groups = values.reshape(
        3,
        count // temporal,
        temporal,
        height // patch // merge,
        merge,
        patch,
        width // patch // merge,
        merge,
        patch,
    )
    return groups.transpose(1, 3, 6, 4, 7, 0, 2, 5, 8).reshape(-1, 3 * temporal * patch**2)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("frame_count", [1, 2, 3, 6])
@pytest.mark.parametrize(("patch", "merge", "temporal"), [(14, 2, 2), (16, 2, 2), (1, 1, 1), (5, 3, 4)])
def test_patches_are_what_numpy_makes(
    dtype: type[Any], frame_count: int, patch: int, merge: int, temporal: int
) -> None:
    random = np.random.default_rng(patch)
    height, width = 2 * patch * merge, 3 * patch * merge
    frames = random.integers(0, 256, (frame_count, height, width, 3), dtype=np.uint8)
    table = random.permutation(3 * 256).reshape(3, 256).astype(dtype)
    expected = reference(frames, table, patch, merge, temporal)
    patches = np.zeros(expected.shape, dtype)
    _pixels.patchify(frames, table, patches, frame_count, height, width, patch, merge, temporal)
    assert np.array_equal(patches, expected)


def test_sizes_that_do_not_match_the_buffers_are_refused() -> None:
    table = np.zeros((3, 256), np.float32)
    frames, patches = np.zeros((1, 4, 4, 3), np.uint8), np.zeros((4, 12), np.float32)
    _pixels.patchify(frames, table, patches, 1, 4, 4, 2, 2, 1)
    enormous = 1 << 62
    for sizes in [
        (2, 4, 4, 2, 2, 1),
        (1, 8, 4, 2, 2, 1),
        (1, 4, 4, 2, 2, 2),
        (1, 4, 4, 3, 1, 1),
        (1, 4, 4, 0, 2, 1),
        (1, 4, 4, 2, 2, -1),
        (1, 4, 4, enormous, 4, 1),
        (enormous, 4, 4, 2, 2, 1),
        (1, 4, 4, 2, 2, enormous),
    ]:
        with pytest.raises(ValueError, match=r"size|multiples"):
            _pixels.patchify(frames, table, patches, *sizes)


def test_tables_of_another_shape_are_refused() -> None:
    frames, patches = np.zeros((1, 4, 4, 3), np.uint8), np.zeros((4, 12), np.float32)
    for table in (np.zeros((3, 256), np.float64), np.zeros((3, 255), np.float32), np.zeros(0, np.float32)):
        with pytest.raises(ValueError, match="table"):
            _pixels.patchify(frames, table, patches, 1, 4, 4, 2, 2, 1)


def test_patches_must_be_writable_and_aligned() -> None:
    frames, table = np.zeros((1, 4, 4, 3), np.uint8), np.zeros((3, 256), np.float32)
    with pytest.raises(TypeError, match="read-write"):
        _pixels.patchify(frames, table, bytes(4 * 12 * 4), 1, 4, 4, 2, 2, 1)
    odd = np.zeros(4 * 12 * 4 + 1, np.uint8)[1:]
    with pytest.raises(ValueError, match="aligned"):
        _pixels.patchify(frames, table, odd, 1, 4, 4, 2, 2, 1)
