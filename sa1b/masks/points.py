"""Point-in-mask test and points of a mask by number, on runs, without pixels.

A point is (x, y): column and row of a pixel, from the top left of the image. Each mask has one point.
"""

import numpy as np
import numpy.typing as npt

from sa1b.masks import geometry
from sa1b.masks.compiled import places
from sa1b.masks.runs import Runs


def contains(runs: Runs, points: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Whether pixel (x, y) = points[i] is foreground of mask i; False outside the image.

    Args:
        points: integers [N, 2].

    Returns:
        bool [N].

    Raises:
        ValueError: points have another type or shape.
    """
    points = integers("points", points, (len(runs), 2))
    x, y = points[:, 0], points[:, 1]
    inside = (x >= 0) & (x < runs.width) & (y >= 0) & (y < runs.height)
    out = np.empty(len(runs), np.bool_)
    places.contains(runs.runs, runs.offsets, np.where(inside, x * runs.height + y, -1), out)
    return out


def nth_foreground(runs: Runs, n: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Foreground pixel number n[i] of mask i, counted from 0 down the columns, from left to right.

    Args:
        n: integers [N].

    Returns:
        int64 [N, 2], (x, y); (-1, -1) where the mask has no such pixel.

    Raises:
        ValueError: n has another type or shape.
    """
    out = np.empty(len(runs), np.int64)
    places.nth_foreground(runs.runs, runs.offsets, integers("n", n, (len(runs),)), out)
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
        ValueError: words have another type or shape.
    """
    words = _checked(runs, words)
    areas = geometry.area(runs).astype(np.uint64)  # areas are below 2**32, so the products fit 64 bits
    half = np.uint64(32)
    low = (words & np.uint64(0xFFFFFFFF)) * areas >> half
    ranks = (words >> half) * areas + low >> half
    return nth_foreground(runs, ranks.astype(np.int64))


def boxes_and_points(
    runs: Runs, words: npt.NDArray[np.uint64], scale: tuple[float, float]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The box, a random point and the area of each mask, scaled; in one call, for the speed of the loader.

    The values are those of `geometry.bbox_sa1b` as x0, y0, x1, y1, `uniform_point` (negative for an empty
    mask) and `geometry.area`: float32 [N, 4], float32 [N, 2] and int64 [N]. `scale` has the factors on x and
    y, after 0.5 is added to the index of a pixel.
    """
    words = _checked(runs, words)
    count = len(runs)
    boxes, points = np.empty((count, 4), np.float32), np.empty((count, 2), np.float32)
    areas = np.empty(count, np.int64)
    size = (runs.height, runs.width)
    places.boxes_and_points(runs.runs, runs.offsets, size, scale, words, boxes, points, areas)
    return boxes, points, areas


def _checked(runs: Runs, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = np.asarray(words)
    if words.dtype != np.uint64 or words.shape != (len(runs),):
        raise ValueError(f"words must be uint64 [{len(runs)}], got {words.dtype} {list(words.shape)}")
    return words


def integers(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The values as a contiguous int64 array of this shape."""
    array = np.asarray(values)
    if array.shape != shape or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be integers {list(shape)}, got {array.dtype} {list(array.shape)}")
    if array.dtype == np.uint64:  # a value too large for int64 is outside every image
        array = np.minimum(array, np.uint64(2**62))
    return np.ascontiguousarray(array, np.int64)
