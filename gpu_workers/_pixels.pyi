"""gpu_workers._pixels: one C function. Sizes are checked against the buffers; the GIL is released."""

from typing_extensions import Buffer

def patchify(
    frames: Buffer,
    table: Buffer,
    patches: Buffer,
    frame_count: int,
    height: int,
    width: int,
    patch: int,
    merge: int,
    temporal: int,
    /,
) -> None:
    """Look every channel of every pixel up and write it where the tower's patch embedding wants it.

    frames: uint8 (frame_count, height, width, 3); height and width are multiples of patch * merge.
    table: (3, 256) elements of 2 or 4 bytes: what each value of each channel becomes.
    patches: writable, elements as in table, (steps * grid_h * grid_w, 3 * temporal * patch * patch) with
    steps = ceil(frame_count / temporal). Rows go by groups of merge x merge patches, as Hugging Face's
    processors order them. Missing frames of the last step repeat the last frame.
    ValueError for sizes that do not match.
    """
