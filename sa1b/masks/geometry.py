"""Geometry of masks on their runs, without pixels, and the overlap of each two masks of two lists.

Every result equals the same operation on the decoded pixels exactly. In every pixel frame, x counts columns
and y counts rows, from the top left pixel of the image. Functions on points take one point for each mask.
`suppress` takes 13 ms for 3,000 boxes, in one thread (`pytest benchmarks/test_masks.py -k suppress`).
"""

from operator import index

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks import grid, shape_kernels
from sa1b.masks.runs import Runs, check_size, check_window


def area(runs: Runs) -> npt.NDArray[np.int64]:
    """Foreground pixels of each mask, int64 [N]."""
    out = np.empty(len(runs), np.int64)
    shape_kernels.area(runs.runs, runs.offsets, out)
    return out


def bbox(runs: Runs) -> npt.NDArray[np.int64]:
    """COCO's bounding box of each mask, int64 [N, 4]: x, y, width, height in pixels; zeros for an empty mask.

    This is the box of the pixels. It equals pycocotools' toBbox if no run after the first has length zero.
    With such runs pycocotools can differ, because it counts both ends of a foreground run without pixels.
    """
    out = np.empty((len(runs), 4), np.int64)
    shape_kernels.bbox(runs.runs, runs.offsets, runs.height, runs.width, out)
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
    check_window(x, y, width, height, (runs.height, runs.width))
    firsts = np.clip(np.arange(runs.height + 1) - y, 0, height)
    return remap(runs, np.arange(x, x + width), firsts, height)


def flip_horizontal(runs: Runs) -> Runs:
    """The masks mirrored left to right: pixels[:, ::-1] of each."""
    return remap(runs, np.arange(runs.width)[::-1], np.arange(runs.height + 1), runs.height)


def flip_vertical(runs: Runs) -> Runs:
    """The masks mirrored top to bottom: pixels[::-1, :] of each."""
    turned = np.empty(len(runs.runs) + len(runs), np.uint32)
    offsets = np.empty_like(runs.offsets)
    shape_kernels.reverse(runs.runs, runs.offsets, turned, offsets)
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
    return remap(runs, columns.sources(), grid.firsts(rows), rows.target)


def frame(runs: Runs, image_size: int, size: int, taken: tuple[int, int] | None = None) -> Runs:
    """The masks in the padded square of image_size pixels that holds the resized image, at size x size.

    The image is at the top left; the rest is background. sa1b.masks.grid has the formula.

    Args:
        runs: masks of one image, N of them.
        image_size: pixels of the square.
        size: pixels of the result, to which the square is resized.
        taken: rows and columns of the square that the image covers; by default its longer side covers the
            complete side of the square.

    Returns:
        N masks of an image of size x size pixels.

    Raises:
        SizeError: image_size or size is not a valid image size.
        ValueError: `taken` does not fit into the square.
    """
    rows, columns = grid.framed((runs.height, runs.width), image_size, size, taken)
    return remap(runs, columns.sources(), grid.firsts(rows), rows.target)


def remap(
    runs: Runs, columns: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], target_height: int
) -> Runs:
    """Masks remapped by a table for each axis, as in sa1b.masks.shape_kernels."""
    boxes = np.empty((len(runs), 4), np.int64)
    shape_kernels.bbox(runs.runs, runs.offsets, runs.height, runs.width, boxes)
    source = (runs.runs, runs.offsets, runs.height, runs.width, boxes)
    axes = (np.ascontiguousarray(columns), firsts, target_height)
    offsets = np.empty_like(runs.offsets)
    shape_kernels.remap(*source, *axes, np.empty(0, np.uint32), offsets)
    out = np.empty(offsets[-1], np.uint32)
    shape_kernels.remap(*source, *axes, out, offsets)
    return Runs(out, offsets, target_height, len(columns))


def contains(runs: Runs, points: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Whether pixel (x, y) = points[i] is foreground of mask i; False outside the image.

    Args:
        points: integers [N, 2].

    Returns:
        bool [N].

    Raises:
        ValueError: the type or shape of the points is wrong.
    """
    points = integers("points", points, (len(runs), 2))
    x, y = points[:, 0], points[:, 1]
    inside = (x >= 0) & (x < runs.width) & (y >= 0) & (y < runs.height)
    out = np.empty(len(runs), np.bool_)
    shape_kernels.contains(runs.runs, runs.offsets, np.where(inside, x * runs.height + y, -1), out)
    return out


def nth_foreground(runs: Runs, n: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Foreground pixel number n[i] of mask i, counted from 0 down the columns, from left to right.

    Args:
        n: integers [N].

    Returns:
        int64 [N, 2], (x, y); (-1, -1) where the mask has no such pixel.

    Raises:
        ValueError: the type or shape of `n` is wrong.
    """
    out = np.empty(len(runs), np.int64)
    shape_kernels.nth_foreground(runs.runs, runs.offsets, integers("n", n, (len(runs),)), out)
    points = np.stack((out // runs.height, out % runs.height), axis=1)
    points[out < 0] = -1
    return points


def uniform_point(runs: Runs, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """A random foreground pixel of each mask, all with the same probability.

    The point is foreground pixel number floor(word * area / 2**64). Over all words, the probability of a
    pixel is 1 / area to within 2**-64. With words from a counter-based generator the point is reproducible.

    Args:
        words: random uint64 [N], uniform over all 64 bits; see `sa1b.hashing.random_words`.

    Returns:
        int64 [N, 2], (x, y); (-1, -1) for an empty mask.

    Raises:
        ValueError: the type or shape of `words` is wrong.
    """
    words = _checked(runs, words)
    areas = area(runs).astype(np.uint64)  # areas are below 2**32, so the products fit 64 bits
    half = np.uint64(32)
    low = (words & np.uint64(0xFFFFFFFF)) * areas >> half
    ranks = (words >> half) * areas + low >> half
    return nth_foreground(runs, ranks.astype(np.int64))


def boxes_and_points(
    runs: Runs, words: npt.NDArray[np.uint64], scale: tuple[float, float]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """`bbox_sa1b` as x0, y0, x1, y1, `uniform_point` and `area` of each mask in one call, for the speed of
    the loader. To indices of pixels 0.5 is added; then they are multiplied by `scale`, factors on x and y.
    """
    words = _checked(runs, words)
    count = len(runs)
    boxes, points = np.empty((count, 4), np.float32), np.empty((count, 2), np.float32)
    areas = np.empty(count, np.int64)
    size = (runs.height, runs.width)
    shape_kernels.boxes_and_points(runs.runs, runs.offsets, size, scale, words, boxes, points, areas)
    return boxes, points, areas


def intersection(a: Runs, b: Runs) -> npt.NDArray[np.int64]:
    """Number of pixels that are foreground in both masks of a pair.

    Args:
        a: Na masks.
        b: Nb masks of the same image, or of an image of the same size.

    Returns:
        int64 [Na, Nb].

    Raises:
        ValueError: the masks belong to images of different sizes.
    """
    if (a.height, a.width) != (b.height, b.width):
        raise BadValue(
            f"masks of images of {a.height} x {a.width} and {b.height} x {b.width} pixels: the images must "
            "have the same size"
        )
    out = np.empty((len(a), len(b)), np.int64)
    ends_a, spans_a, boxes_a = _prepared(a)
    ends_b, spans_b, boxes_b = _prepared(b)
    shape_kernels.intersection(ends_a, a.offsets, spans_a, boxes_a, ends_b, b.offsets, spans_b, boxes_b, out)
    return out


def iou(a: Runs, b: Runs) -> npt.NDArray[np.float64]:
    """Intersection over union of each pair of masks, equal bit for bit to pycocotools.mask.iou without crowd.

    Args:
        a: Na masks.
        b: Nb masks of the same image, or of an image of the same size.

    Returns:
        float64 [Na, Nb], 0 to 1; 0 where both masks are empty.

    Raises:
        ValueError: the masks belong to images of different sizes.
    """
    common = intersection(a, b)
    union = area(a)[:, None] + area(b)[None, :] - common
    ratios: npt.NDArray[np.float64] = common / np.maximum(union, 1)
    return ratios


def suppress(boxes: npt.ArrayLike, scores: npt.ArrayLike, max_iou: float) -> npt.NDArray[np.int64]:
    """Non-maximum suppression: drop each box that overlaps a box with a higher score.

    Args:
        boxes: [N, 4], x, y, width and height in pixels, such as those of `bbox_sa1b`. The result for
            boxes of SA-1B is that of the published mask generator, whose boxes end at the last pixel too.
            Boxes without area, such as those of masks of one column, overlap only if they are equal.
        scores: [N]; of equal scores, the first one counts as higher.
        max_iou: 0 to 1; a box is dropped if its IoU with a box that stays is above.

    Returns:
        int64 [K], indices of the boxes that stay, by descending score.

    Raises:
        ValueError: the shape of `boxes` or `scores` is wrong.
    """
    corners, ranked = np.asarray(boxes, np.float64), np.asarray(scores)
    if corners.ndim != 2 or corners.shape[1] != 4 or ranked.shape != corners.shape[:1]:
        raise BadValue(f"boxes must be [N, 4] and scores [N], got {corners.shape} and {ranked.shape}")
    order = np.argsort(-ranked, kind="stable")
    kept = np.empty(len(order), np.bool_)
    shape_kernels.suppress(np.ascontiguousarray(corners[order]), float(max_iou), kept)
    return order[kept]


def _prepared(runs: Runs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ends of the runs [R], span of the foreground [N, 2] and box [N, 4] of each mask."""
    ends = np.empty(len(runs.runs), np.int64)
    spans = np.empty((len(runs), 2), np.int64)
    boxes = np.empty((len(runs), 4), np.int64)
    shape_kernels.cumulate(runs.runs, runs.offsets, ends, spans)
    shape_kernels.bbox(runs.runs, runs.offsets, runs.height, runs.width, boxes)
    return ends, spans, boxes


def _checked(runs: Runs, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = np.asarray(words)
    if words.dtype != np.uint64 or words.shape != (len(runs),):
        raise BadValue(f"words must be uint64 [{len(runs)}], got {words.dtype} {list(words.shape)}")
    return words


def integers(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.shape != shape or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise BadValue(f"{name} must be integers {list(shape)}, got {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array, np.int64)
