"""Overlap of every mask of one list with every mask of another, on runs, without pixels."""

import numpy as np
import numpy.typing as npt

from sa1b.masks import geometry
from sa1b.masks.compiled import measures, pairs
from sa1b.masks.runs import Runs


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
        raise ValueError(
            f"masks of images of {a.height} x {a.width} and {b.height} x {b.width} pixels: the images must "
            "have the same size"
        )
    out = np.empty((len(a), len(b)), np.int64)
    ends_a, spans_a, boxes_a = prepare(a)
    ends_b, spans_b, boxes_b = prepare(b)
    pairs.intersection(ends_a, a.offsets, spans_a, boxes_a, ends_b, b.offsets, spans_b, boxes_b, out)
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
    union = geometry.area(a)[:, None] + geometry.area(b)[None, :] - common
    ratios: npt.NDArray[np.float64] = common / np.maximum(union, 1)
    return ratios


def prepare(
    runs: Runs,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ends of the runs [R], span of the foreground [N, 2] and box [N, 4] of each mask."""
    ends = np.empty(len(runs.runs), np.int64)
    spans = np.empty((len(runs), 2), np.int64)
    boxes = np.empty((len(runs), 4), np.int64)
    pairs.cumulate(runs.runs, runs.offsets, ends, spans)
    measures.bbox(runs.runs, runs.offsets, runs.height, runs.width, boxes)
    return ends, spans, boxes
