"""Point-in-mask test, positions of foreground pixels by number, and a box and a point of each mask."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel
from sa1b.masks.compiled.measures import area, bbox


@kernel
def contains(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[np.bool_],
) -> None:
    """Write into out [N] whether pixel places[i] (column-major; -1: no pixel) is foreground of mask i."""
    for mask in range(len(places)):
        place = places[mask]
        end = np.int64(0)
        inside = False
        if place >= 0:
            for index in range(offsets[mask], offsets[mask + 1]):
                end += np.int64(runs[index])
                if end > place:
                    inside = (index - offsets[mask]) & 1 == 1
                    break
        out[mask] = inside


@kernel
def nth_foreground(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Write into out [N] the position (column-major) of foreground pixel ranks[i] of mask i; -1 if none."""
    for mask in range(len(ranks)):
        left = ranks[mask]
        position = np.int64(0)
        place = np.int64(-1)
        for index in range(offsets[mask], offsets[mask + 1]):
            run = np.int64(runs[index])
            if (index - offsets[mask]) & 1:
                if left >= 0 and left < run:
                    place = position + left
                    break
                left -= run
            position += run
        out[mask] = place


@kernel
def boxes_and_points(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    size: tuple[int, int],
    scale: tuple[float, float],
    words: npt.NDArray[np.uint64],
    boxes: npt.NDArray[np.float32],
    points: npt.NDArray[np.float32],
    areas: npt.NDArray[np.int64],
) -> None:
    """Write the box [N, 4], a point [N, 2] and the area [N] of each mask; see sa1b.masks.points.

    Args:
        size: height and width of the image in pixels.
        scale: factors on x and y.
    """
    height, width = size
    across, down = scale
    count = len(areas)
    corners = np.empty((count, 4), np.int64)
    ranks = np.empty(count, np.int64)
    places = np.empty(count, np.int64)
    area(runs, offsets, areas)
    bbox(runs, offsets, height, width, corners)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for mask in range(count):
        pixels = np.uint64(areas[mask])  # below 2**32, so the products fit 64 bits
        rest = ((words[mask] & low) * pixels) >> half
        ranks[mask] = np.int64(((words[mask] >> half) * pixels + rest) >> half)
    nth_foreground(runs, offsets, ranks, places)
    for mask in range(count):
        left, top = corners[mask, 0], corners[mask, 1]
        boxes[mask, 0] = (left + 0.5) * across
        boxes[mask, 1] = (top + 0.5) * down
        boxes[mask, 2] = (max(corners[mask, 2], left) + 0.5) * across
        boxes[mask, 3] = (max(corners[mask, 3], top) + 0.5) * down
        place = places[mask]
        points[mask, 0] = ((place // height if place >= 0 else -1) + 0.5) * across
        points[mask, 1] = ((place % height if place >= 0 else -1) + 0.5) * down
