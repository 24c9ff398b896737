"""Masks as pixels, rasterised from their runs directly at the requested size, and pixels to runs.

64 masks of 2250x1500 into a reused buffer, one thread: 1.3 ms at 1024x1024, including 0.7 ms to clear the
buffer, and 0.11 ms at 256x256; pycocotools and cv2.resize take 206 and 175 ms
(`pytest benchmarks/test_masks.py -k raster`).

Logits of a model are enlarged to the pixels of their image and encoded as runs, without a dense mask. The
values are those of `sa1b.sam.prediction.at_source`: its two bilinear interpolations of an axis are one sum of
four logits here. 16 masks of 4 % of an image of 2250 x 1500 take 41 ms with their areas, in one thread;
`at_source` and `Runs.from_pixels` take 655 ms (`pytest benchmarks -k logits`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks import grid, pixel_kernels
from sa1b.masks.runs import Runs, check_size, check_window, chosen_indices

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
        ValueError: shape, type or layout of `out` is wrong, or `dtype` is neither uint8 nor bool.
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
        taken: rows and columns of the square that the image covers; by default its longer side covers the
            complete side of the square.
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
        ValueError: shape, type or layout of `out` or `boxes` is wrong, `dtype` is neither uint8 nor bool, or
            `taken` does not fit into the square.
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
    out = np.empty(shape, dtype) if out is None else out
    if out.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
        raise BadValue(f"dtype of dense masks must be uint8 or bool, got {out.dtype}")
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise BadValue(f"out must be C-contiguous and writeable {list(shape)}, got {list(out.shape)}")
    if boxes is None:
        boxes = np.tile([0, rows.target, 0, columns.target], (len(masks), 1))
    elif boxes.shape != (len(masks), 4) or boxes.dtype != np.int64:
        raise BadValue(f"boxes must be int64 [{len(masks)}, 4], got {boxes.dtype} {list(boxes.shape)}")
    firsts = grid.firsts(rows), grid.firsts(columns)
    pixel_kernels.rasterize(runs.runs, runs.offsets, masks, *firsts, out.view(np.uint8), boxes)
    return out


def rasterize_read(
    runs: Runs, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Masks whose pixels read the given source rows and columns, each ascending: uint8 [N, rows, columns]."""
    out = np.empty((len(runs), len(rows), len(columns)), np.uint8)
    boxes = np.tile([0, len(rows), 0, len(columns)], (len(runs), 1))
    each = np.arange(len(runs), dtype=np.int64)
    down, across = (
        np.searchsorted(read, np.arange(source + 1)).astype(np.int64)
        for read, source in ((rows, runs.height), (columns, runs.width))
    )
    pixel_kernels.rasterize(runs.runs, runs.offsets, each, down, across, out, boxes)
    return out


def painted(runs: Runs, most: float = np.inf) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """N masks painted over one another, except those of which more than the part `most` is painted already:
    the number of the mask at each pixel, from 1, int32 [height, width], and the masks painted, bool [N].
    """
    out, kept = np.zeros((runs.width, runs.height), np.int32), np.empty(len(runs), np.bool_)
    pixel_kernels.paint(runs.runs, runs.offsets, float(most), out.reshape(-1), kept)
    return out.T, kept


Logits = npt.NDArray[np.float32]


class LogitAxis(NamedTuple):
    """How the pixels of an image read logits along one axis."""

    reads: npt.NDArray[np.int64]  # [n, 4], the logits that each pixel reads, in ascending order
    weights: npt.NDArray[np.float32]  # [n, 4], which add up to 1
    starts: npt.NDArray[np.int64]  # [R], for each logit the first pixel that reads it or a later one
    stops: npt.NDArray[np.int64]  # [R], for each logit the end of the pixels that read it or an earlier one


def logit_axis(length: int, taken: int, image_size: int, side: int) -> LogitAxis:
    """The axis of an image of `length` pixels in the padded square of image_size pixels, with `side` logits.

    `taken`: pixels of the square that the image covers, see `grid.framed_size`.
    """
    near, near_weights = _bilinear(taken, length)  # pixels of the square, [n, 2]
    far, far_weights = _bilinear(side, image_size)  # logits, [image_size, 2]
    reads = np.ascontiguousarray(far[near].reshape(length, 4))
    weights = (near_weights[:, :, None] * far_weights[near]).reshape(length, 4)
    each = np.arange(side)
    return LogitAxis(
        reads,
        weights.astype(np.float32),
        np.searchsorted(reads[:, 3], each, "left").astype(np.int64),
        np.searchsorted(reads[:, 0], each, "right").astype(np.int64),
    )


def areas(logits: Logits, rows: LogitAxis, columns: LogitAxis, offset: float) -> npt.NDArray[np.int64]:
    """Pixels of each mask above 0, `offset` and -`offset`: int64 [M, 3], from logits float32 [M, R, R]."""
    counts, every = np.empty((len(logits), 3), np.int64), np.arange(len(logits), dtype=np.int64)
    image = len(rows.reads), len(columns.reads)
    out = np.empty(0, np.uint32), np.empty(len(logits) + 1, np.int64)  # the runs are only counted
    values = np.ascontiguousarray(logits, np.float32)
    pixel_kernels.enlarge(values, every, *rows, *columns, 0, 0, *image, float(offset), counts, *out)
    return counts


def runs_of_logits(
    logits: Logits,
    select: npt.ArrayLike,
    rows: LogitAxis,
    columns: LogitAxis,
    *,
    position: tuple[int, int] = (0, 0),
    image: tuple[int, int] | None = None,
) -> Runs:
    """The masks of the pixels whose enlarged logit is above 0: K masks in canonical form.

    Logits are float32 [M, R, R], of the padded square; `select` is as for `Runs.select`. `position` is x and
    y of the enlarged logits in the `image`, height and width, if they are of a crop.
    """
    size = len(rows.reads), len(columns.reads)
    height, width = size if image is None else check_size(*image)
    x, y = position
    check_window(x, y, size[1], size[0], (height, width))
    values, chosen = np.ascontiguousarray(logits, np.float32), chosen_indices(select, len(logits))
    areas, offsets = np.empty((len(chosen), 3), np.int64), np.empty(len(chosen) + 1, np.int64)
    out = np.empty(0, np.uint32)
    for _ in range(2):  # the first pass counts the runs
        pixel_kernels.enlarge(values, chosen, *rows, *columns, x, y, height, width, 0.0, areas, out, offsets)
        out = np.empty(offsets[-1], np.uint32) if not len(out) else out
    return Runs(out, offsets, height, width)


def _bilinear(source: int, target: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The two source pixels that each target pixel reads, [target, 2], and their weights."""
    # Bilinear interpolation of pixel centres without antialiasing; pixels at the border are repeated.
    at = np.maximum((np.arange(target) + 0.5) * (source / target) - 0.5, 0)
    first = np.minimum(at.astype(np.int64), source - 1)
    second = np.minimum(first + 1, source - 1)
    part = at - first
    return np.stack([first, second], axis=1), np.stack([1 - part, part], axis=1)
