"""Masks of polygons: the bits of pycocotools, for any polygon that it can rasterise."""

import numpy as np
import pytest
from pycocotools import mask as pycocotools

from sa1b import masks
from sa1b.masks.coco import encode_polygons


def polygon(rng: np.random.Generator, height: int, width: int) -> list[float]:
    points = rng.uniform(-0.3, 1.3, (rng.integers(3, 12), 2)) * [width, height]
    match rng.integers(7):
        case 0:
            points = np.round(points)
        case 1:
            points = np.round(2 * points) / 2
        case 2:
            points = np.clip(points, 0, [width, height])
        case 3:
            points = np.repeat(points, 2, axis=0)  # lines of length zero
        case 4:
            points = np.round(5 * points) / 5 + rng.choice([0, 0.1, -0.1])  # on the fine grid, and between
        case 5:
            points = rng.uniform(0, 2, points.shape) + rng.uniform(0, 1, 2) * [width, height]  # tiny
    return points.reshape(-1).tolist()


def expected(parts: list[list[float]], height: int, width: int) -> bytes:
    counts: bytes = pycocotools.merge(pycocotools.frPyObjects(parts, height, width))["counts"]
    return counts


def test_the_string_of_polygons_is_that_of_pycocotools_and_decodes():
    rng = np.random.default_rng(5)
    for _ in range(300):
        height, width = map(int, rng.integers(1, 90, 2))
        parts = [polygon(rng, height, width) for _ in range(rng.integers(1, 4))]
        string = encode_polygons(parts, height, width)
        assert string == expected(parts, height, width)
        assert masks.encode(masks.decode([string], height, width).check()) == [string]
    around = [[-5, -5, 90, -5, 90, 90, -5, 90]]
    assert masks.area(masks.decode([encode_polygons(around, 30, 40)], 30, 40)).tolist() == [1200]


SQUARE = [1, 1, 5, 1, 5, 5]


@pytest.mark.parametrize(
    ("parts", "reason", "message"),
    [
        ([], "bad_polygon", "has no polygon"),
        ([[1, 2, 3, 4]], "bad_polygon", "has 4 coordinates"),
        ([[1, 2, 3, 4, 5, 6, 7]], "bad_polygon", "has 7 coordinates"),
        (SQUARE, "bad_polygon", "coordinates"),
        ([["a"] * 6], "bad_polygon", "not a number"),
        ([[[1, 2], [3, 4], [5, 6]]], "bad_polygon", "coordinates"),
        ([[1, 2, 3, float("nan"), 5, 6]], "bad_polygon", "finite number below 1,000,000"),
        ([[1, 2, 3, 1e300, 5, 6]], "bad_polygon", "finite number below 1,000,000"),
        ([[-9e5, 0, 9e5, 0, -9e5, 3] * 3], "polygon_too_long", "longer than 838,861 pixels"),
    ],
)
def test_what_is_no_polygon_is_refused(parts, reason, message):
    with pytest.raises(masks.MaskError, match=message) as caught:
        encode_polygons(parts, 10, 10)
    assert caught.value.reason == reason
