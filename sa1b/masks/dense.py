"""Pixels to runs, for masks that a model predicts."""

import numpy as np
import numpy.typing as npt

from sa1b.masks.runs import Runs


def runs_of(pixels: npt.NDArray[np.bool_]) -> Runs:
    """The runs of dense masks, bool [N, height, width]; the inverse of `raster.rasterize`.

    Raises:
        ValueError: `pixels` does not have three dimensions, or its height or width is zero.
    """
    if pixels.ndim != 3 or 0 in pixels.shape[1:]:
        raise ValueError(f"pixels must be [N, height, width], got {list(pixels.shape)}")
    count, height, width = pixels.shape
    columns = pixels.transpose(0, 2, 1).reshape(count, height * width)
    # A run starts where a pixel differs from the previous one; background precedes the first pixel.
    before = np.concatenate((np.zeros((count, 1), bool), columns[:, :-1]), axis=1)
    masks, starts = np.nonzero(columns != before)
    number = np.bincount(masks, minlength=count) + 1  # the leading background run, possibly of length 0
    offsets = np.concatenate(([0], np.cumsum(number)))
    bounds = np.zeros(offsets[-1] + 1, np.int64)
    bounds[np.arange(len(starts)) + masks + 1] = starts
    ends = np.append(bounds[1:], 0)
    ends[offsets[1:] - 1] = height * width
    lengths = ends[: offsets[-1]] - bounds[: offsets[-1]]
    return Runs(lengths.astype(np.uint32), offsets, height, width)
