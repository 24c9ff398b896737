"""Masks as pixels, rasterised from their runs directly at the requested size, and pixels to runs.

64 masks of 2250x1500 into a reused buffer, one thread: 1.3 ms at 1024x1024, including 0.7 ms to clear the
buffer, and 0.11 ms at 256x256; pycocotools and cv2.resize take 206 and 175 ms
(`pytest benchmarks/test_masks.py -k raster`).
"""

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks import grid, pixel_kernels
from sa1b.masks.runs import Runs

Raster = npt.NDArray[np.uint8] | npt.NDArray[np.bool_]


def rasterize(
    runs: Runs,
    height: int | None = None,
    width: int | None = None,
    *,
    select: npt.ArrayLike | None = None,
    out: Raster | None = None,
    dtype: npt.DTypeLike = np.uint8,
) -> Raster:
    """Masks of one image as pixels, resized to height x width; equal to `sa1b.masks.resize` on runs.

    A pixel reads the source pixel nearest to its centre, computed in integers; see `sa1b.masks.grid`.

    Args:
        runs: masks of one image, N of them.
        height: rows of a dense mask; by default those of the image.
        width: columns of a dense mask; by default those of the image.
        select: which masks, K of them, as for `Runs.select`; by default all.
        out: buffer to write, uint8 or bool [K, height, width], C-contiguous. No other allocation grows with
            the dense masks.
        dtype: dtype of a new buffer, uint8 or bool.

    Returns:
        `out`, or a new [K, height, width]: 1 is foreground, 0 background.

    Raises:
        SizeError: height or width is not a valid image size.
        ValueError: `out` has another shape, type or layout, or `dtype` is another type.
        IndexError: `select` has an index that no mask has.
    """
    source = (runs.height, runs.width)
    target = (runs.height if height is None else height, runs.width if width is None else width)
    return fill_axes(runs, grid.resized(source, target), select, out=out, dtype=dtype)


def rasterize_frame(
    runs: Runs,
    image_size: int,
    size: int,
    *,
    taken: tuple[int, int] | None = None,
    select: npt.ArrayLike | None = None,
    out: Raster | None = None,
    dtype: npt.DTypeLike = np.uint8,
    boxes: npt.NDArray[np.int64] | None = None,
) -> Raster:
    """Masks of one image in the padded square, as pixels at size x size; equal to `sa1b.masks.frame` on runs.

    Args:
        runs: masks of one image, N of them.
        image_size: pixels of the square that holds the resized image at its top left.
        size: pixels of a dense mask.
        taken: rows and columns of the square that the image covers; by default its longer side covers all.
        select: which masks, K of them, as for `Runs.select`; by default all.
        out: buffer to write, uint8 or bool [K, size, size], C-contiguous.
        dtype: dtype of a new buffer, uint8 or bool.
        boxes: int64 [K, 4], for each mask of `out` the box (top, bottom, left, right, in rows and columns)
            outside which all pixels are already 0; receives the boxes of the new masks. A reused buffer is
            then cleared only inside these boxes. By default the complete buffer is cleared.

    Returns:
        `out`, or a new [K, size, size]: 1 is foreground, 0 background and padding.

    Raises:
        SizeError: image_size or size is not a valid image size.
        ValueError: `out` or `boxes` has another shape, type or layout, `dtype` is another type, or `taken`
            does not fit into the square.
        IndexError: `select` has an index that no mask has.
    """
    axes = grid.framed((runs.height, runs.width), image_size, size, taken)
    return fill_axes(runs, axes, select, out=out, dtype=dtype, boxes=boxes)


def fill_axes(
    runs: Runs,
    axes: tuple[grid.Axis, grid.Axis],
    select: npt.ArrayLike | None,
    *,
    out: Raster | None,
    dtype: npt.DTypeLike,
    boxes: npt.NDArray[np.int64] | None = None,
) -> Raster:
    rows, columns = axes
    masks = np.arange(len(runs), dtype=np.int64) if select is None else runs.indices(select)
    shape = (len(masks), rows.target, columns.target)
    if out is None:
        if np.dtype(dtype) not in (np.dtype(np.uint8), np.dtype(np.bool_)):
            raise BadValue(f"dtype must be uint8 or bool, got {np.dtype(dtype)}")
        out = np.empty(shape, dtype)
    elif out.shape != shape:
        raise BadValue(f"out must have shape {list(shape)}, got {list(out.shape)}")
    elif out.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
        raise BadValue(f"out must be uint8 or bool, got {out.dtype}")
    elif not out.flags.c_contiguous or not out.flags.writeable:
        raise BadValue("out must be C-contiguous and writeable")
    if boxes is None:
        boxes = np.tile([0, rows.target, 0, columns.target], (len(masks), 1))
    elif boxes.shape != (len(masks), 4) or boxes.dtype != np.int64:
        raise BadValue(f"boxes must be int64 [{len(masks)}, 4], got {boxes.dtype} {list(boxes.shape)}")
    firsts = rows.firsts(), columns.firsts()
    pixel_kernels.rasterize(runs.runs, runs.offsets, masks, *firsts, out.view(np.uint8), boxes)
    return out


def runs_of(pixels: npt.NDArray[np.bool_]) -> Runs:
    """The runs of dense masks, bool [N, height, width]; the inverse of `rasterize`.
    ValueError: `pixels` does not have three dimensions, or its height or width is zero.
    """
    if pixels.ndim != 3 or 0 in pixels.shape[1:]:
        raise BadValue(f"pixels must be [N, height, width], got {list(pixels.shape)}")
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
