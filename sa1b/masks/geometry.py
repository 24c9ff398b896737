"""Geometry of masks on their runs, without pixels.

Every result equals the same operation on the decoded pixels exactly. In every pixel frame, x counts columns
and y counts rows, from the top left pixel of the image.
"""

from operator import index

import numpy as np
import numpy.typing as npt

from sa1b.masks import grid
from sa1b.masks.compiled import measures, transforms
from sa1b.masks.runs import Runs, check_size


def area(runs: Runs) -> npt.NDArray[np.int64]:
    """Foreground pixels of each mask, int64 [N]."""
    out = np.empty(len(runs), np.int64)
    measures.area(runs.runs, runs.offsets, out)
    return out


def bbox(runs: Runs) -> npt.NDArray[np.int64]:
    """COCO's bounding box of each mask, int64 [N, 4]: x, y, width, height in pixels; zeros for an empty mask.

    This is the box of the pixels. It equals pycocotools' toBbox if no run after the first has length zero.
    With such runs pycocotools can differ, because it counts both ends of a foreground run without pixels.
    """
    out = np.empty((len(runs), 4), np.int64)
    measures.bbox(runs.runs, runs.offsets, runs.height, runs.width, out)
    out[:, 2:] += 1 - out[:, :2]
    return out


def bbox_sa1b(runs: Runs) -> npt.NDArray[np.int64]:
    """SA-1B's bounding box of each mask, int64 [N, 4]: x, y, width - 1, height - 1; zeros for an empty mask.

    In SA-1B, the width is the last column minus the first, so a mask of one column has width 0.
    """
    out = bbox(runs)
    out[:, 2:] = np.maximum(out[:, 2:] - 1, 0)
    return out


def crop(runs: Runs, x: int, y: int, width: int, height: int) -> Runs:
    """The masks inside a window of the image: pixels[y : y + height, x : x + width] of each.

    Args:
        runs: masks of one image, N of them.
        x: first column of the window, pixels of the image.
        y: first row of the window.
        width: columns of the window.
        height: rows of the window.

    Returns:
        N masks of an image of height x width pixels.

    Raises:
        SizeError: width or height is not a valid image size.
        ValueError: the window is not inside the image.
    """
    height, width = check_size(height, width)
    x, y = index(x), index(y)
    if x < 0 or y < 0 or x + width > runs.width or y + height > runs.height:
        raise ValueError(
            f"window x {x}, y {y}, {width} wide, {height} high must be "
            f"inside the image of {runs.height} x {runs.width} pixels (height x width)"
        )
    firsts = np.clip(np.arange(runs.height + 1) - y, 0, height)
    return remap(runs, np.arange(x, x + width), firsts, height)


def flip_horizontal(runs: Runs) -> Runs:
    """The masks mirrored left to right: pixels[:, ::-1] of each."""
    return remap(runs, np.arange(runs.width)[::-1], np.arange(runs.height + 1), runs.height)


def flip_vertical(runs: Runs) -> Runs:
    """The masks mirrored top to bottom: pixels[::-1, :] of each."""
    turned = np.empty(len(runs.runs) + len(runs), np.uint32)
    offsets = np.empty_like(runs.offsets)
    transforms.reverse(runs.runs, runs.offsets, turned, offsets)
    return flip_horizontal(Runs(turned[: offsets[-1]], offsets, runs.height, runs.width))


def resize(runs: Runs, height: int, width: int) -> Runs:
    """Masks resized by nearest neighbour of pixel centres, in integers.

    Along each axis, target pixel d reads source pixel ((2 * d + 1) * n) // (2 * m), with n the source size
    and m the target size in pixels. The same size returns the masks in canonical form (no runs of length zero
    after the first).

    Args:
        runs: masks of one image, N of them.
        height: pixels of the resized image.
        width: pixels of the resized image.

    Raises:
        SizeError: height or width is not a valid image size.
    """
    rows, columns = grid.resized((runs.height, runs.width), (height, width))
    return remap(runs, columns.sources(), rows.firsts(), rows.target)


def frame(runs: Runs, image_size: int, size: int, taken: tuple[int, int] | None = None) -> Runs:
    """The masks in the padded square of image_size pixels that holds the resized image, at size x size.

    The image is at the top left; the rest is background. sa1b.masks.grid has the formula.

    Args:
        runs: masks of one image, N of them.
        image_size: pixels of the square.
        size: pixels of the result, to which the square is resized.
        taken: rows and columns of the square that the image covers; by default its longer side covers all.

    Returns:
        N masks of an image of size x size pixels.

    Raises:
        SizeError: image_size or size is not a valid image size.
        ValueError: `taken` does not fit into the square.
    """
    rows, columns = grid.framed((runs.height, runs.width), image_size, size, taken)
    return remap(runs, columns.sources(), rows.firsts(), rows.target)


def remap(
    runs: Runs, columns: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], target_height: int
) -> Runs:
    """Masks remapped by a table for each axis, as in sa1b.masks.compiled.transforms."""
    boxes = np.empty((len(runs), 4), np.int64)
    measures.bbox(runs.runs, runs.offsets, runs.height, runs.width, boxes)
    source = (runs.runs, runs.offsets, runs.height, runs.width, boxes)
    axes = (np.ascontiguousarray(columns), firsts, target_height)
    offsets = np.empty_like(runs.offsets)
    transforms.remap(*source, *axes, np.empty(0, np.uint32), offsets)
    out = np.empty(offsets[-1], np.uint32)
    transforms.remap(*source, *axes, out, offsets)
    return Runs(out, offsets, target_height, len(columns))
