"""Polygons to masks and masks to polygons, with the pixels of pycocotools in both directions."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sa1b.masks import geometry, pixel_kernels
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import MaskError, Runs, check_size

MAX_LENGTH = 838_861  # pixels, of the lines of one mask: 100 bytes for each fifth of a pixel
_FARTHEST = 1e6  # pixels: largest coordinate


def encode_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> bytes:
    """The compressed string of the mask of polygons, such as those of a COCO file's `segmentation`.

    A polygon is x and y of its vertices in turn, at least three, in pixels from the corner of the top left
    pixel. They may be outside of the image.

    Raises:
        MaskError: there is no polygon, a polygon has fewer than three vertices, an odd number of coordinates
            or a coordinate that is not a finite number below 1,000,000 (bad_polygon), or the lines are longer
            than 838,861 pixels (polygon_too_long).
    """
    # To a mask: pycocotools traces a polygon on a grid five times finer than the pixels. A pixel belongs to a
    # mask of several polygons if it belongs to one of them. The checks come first: pycocotools takes memory
    # for the length of the lines without a limit, and converts numbers that are not finite to whole ones.
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


Polygon = npt.NDArray[np.int32]


def polygons(runs: Runs, *, single: bool = False) -> list[list[Polygon]]:
    """The polygons of each mask, one for each part, or a `single` one that joins all parts.

    A polygon is int32 [V, 2]: x and y of the vertices in pixels from the corner of the top left pixel. Pixels
    that touch at a corner only belong to different parts. A mask without pixels has no polygon.
    """
    # To polygons: they follow the sides of pixels. A hole is joined to the border around it by a line that
    # the polygon follows in both directions; with `single`, so are the parts of a mask. Programs that also
    # paint the lines, like OpenCV's fillPoly, paint these lines, and pixels right of and below the mask. 100
    # masks (200,000 runs) take 80 ms in one thread.
    boxes = geometry.bbox(runs).tolist()
    polygons_of_masks: list[list[Polygon]] = []
    for index, (x, y, width, height) in enumerate(boxes):
        if not width:
            polygons_of_masks.append([])
            continue
        crop = geometry.crop(runs.select([index]), x, y, width, height)
        pixels = np.pad(rasterize(crop)[0], 1)
        borders, parts = _borders(pixels)
        origin = np.array([x - 1, y - 1], np.int32)
        groups = [borders] if single else _grouped(borders, parts)
        polygons_of_masks.append([_joined(group) + origin for group in groups])
    return polygons_of_masks


def _borders(pixels: npt.NDArray[np.uint8]) -> tuple[list[Polygon], npt.NDArray[np.int32]]:
    """Borders of padded pixels, outer ones before the holes in them, and the part that each belongs to."""
    import cv2  # a source of COCO files reads polygons without it

    sides = int(np.count_nonzero(pixels[1:] & (pixels[:-1] ^ 1)))
    points = np.empty((4 * sides, 2), np.int32)
    ends = np.empty(sides, np.int64)
    starts = np.empty((sides, 2), np.int32)
    _, labels = cv2.connectedComponents(pixels, connectivity=4)
    count = pixel_kernels.trace(pixels, points, ends, starts)
    parts = labels[starts[:count, 0], starts[:count, 1]].astype(np.int32)
    last = int(ends[count - 1]) if count else 0
    return np.split(points[:last], ends[: count - 1]), parts


def _grouped(borders: list[Polygon], parts: npt.NDArray[np.int32]) -> list[list[Polygon]]:
    groups: dict[int, list[Polygon]] = {}
    for border, part in zip(borders, parts.tolist(), strict=True):
        groups.setdefault(part, []).append(border)
    return list(groups.values())


def _joined(borders: list[Polygon]) -> Polygon:
    """One polygon: each border after the first is reached from the first vertex, and left to it again."""
    first, *others = borders
    pieces = [first]
    for border in others:
        pieces += [first[:1], border, border[:1]]
    return np.concatenate([*pieces, first[:1]] if others else pieces)
