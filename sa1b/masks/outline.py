"""Masks as polygons along the sides of pixels, which pycocotools fills with exactly the same pixels.

A hole is joined to the border around it by a line that the polygon follows in both directions; with `single`,
so are the parts of a mask. Programs that also paint the lines, like OpenCV's fillPoly, paint these lines, and
pixels right of and below the mask. 100 masks (200,000 runs) take 80 ms in one thread.
"""

import cv2
import numpy as np
import numpy.typing as npt

from sa1b.masks import geometry
from sa1b.masks.compiled import outline
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import Runs

Polygon = npt.NDArray[np.int32]


def polygons(runs: Runs, *, single: bool = False) -> list[list[Polygon]]:
    """The polygons of each mask, one for each part, or a `single` one that joins all parts.

    Returns:
        For each mask a list of int32 [V, 2]: x and y of the vertices in pixels from the corner of the top
        left pixel. Pixels that touch at a corner only belong to different parts. A mask without pixels has no
        polygon.
    """
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
    sides = int(np.count_nonzero(pixels[1:] & (pixels[:-1] ^ 1)))
    points = np.empty((4 * sides, 2), np.int32)
    ends = np.empty(sides, np.int64)
    starts = np.empty((sides, 2), np.int32)
    _, labels = cv2.connectedComponents(pixels, connectivity=4)
    count = outline.trace(pixels, points, ends, starts)
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
