"""The string of a mask of polygons: the pixels of pycocotools' `frPyObjects` and `merge`.

pycocotools traces a polygon on a grid five times finer than the pixels. A pixel belongs to a mask of several
polygons if it belongs to one of them. The checks come first: pycocotools takes memory for the length of the
lines without a limit, and converts numbers that are not finite to whole ones.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sa1b.masks.runs import MaskError, check_size

MAX_LENGTH = 838_861  # pixels, of the lines of one mask: 100 bytes for each fifth of a pixel
_FARTHEST = 1e6  # pixels: largest coordinate


def encode_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> bytes:
    """The compressed string of the mask of polygons, such as those of a COCO file's `segmentation`.

    Args:
        polygons: for each polygon x and y of its vertices in turn, at least three vertices, in pixels from
            the corner of the top left pixel. They may be outside of the image.

    Raises:
        MaskError: there is no polygon, a polygon has fewer than three vertices, an odd number of coordinates
            or a coordinate that is not a finite number below 1,000,000 (bad_polygon), or the lines are longer
            than 838,861 pixels (polygon_too_long).
    """
    from pycocotools import mask

    height, width = check_size(height, width)
    if not len(polygons):
        raise MaskError(0, "bad_polygon", "it has no polygon")
    vertices = [_vertices(polygon) for polygon in polygons]
    if sum(map(_length, vertices)) > MAX_LENGTH:
        raise MaskError(0, "polygon_too_long", f"its lines are longer than {MAX_LENGTH:,} pixels")
    parts = mask.frPyObjects([polygon.tolist() for polygon in vertices], height, width)
    counts: bytes = mask.merge(parts)["counts"]
    return counts


def _vertices(polygon: Sequence[float]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(polygon, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise MaskError(0, "bad_polygon", "a coordinate of its polygons is not a number") from None
    if numbers.ndim != 1 or len(numbers) % 2 or len(numbers) < 6:
        why = (
            f"a polygon has {numbers.size:,} coordinates; it must have two for each of three or more vertices"
        )
        raise MaskError(0, "bad_polygon", why)
    if not (np.abs(numbers) < _FARTHEST).all():
        why = f"a coordinate of its polygons is not a finite number below {_FARTHEST:,.0f}"
        raise MaskError(0, "bad_polygon", why)
    return numbers


def _length(polygon: npt.NDArray[np.float64]) -> float:
    """Pixels that a polygon's lines have along their longer axes."""
    vertices = polygon.reshape(-1, 2)
    return float(np.abs(vertices - np.roll(vertices, -1, axis=0)).max(axis=1).sum())
