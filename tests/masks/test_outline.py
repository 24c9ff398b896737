"""Polygons of masks: pycocotools makes the same mask of them."""

import numpy as np
import pytest
from pycocotools import mask as pycocotools

from sa1b.masks import Runs
from sa1b.masks.coco import polygons


@pytest.mark.parametrize("one", [False, True])
def test_pycocotools_makes_the_same_mask_of_the_polygons(one):
    rng = np.random.default_rng(1)
    for _ in range(200):
        height, width = map(int, rng.integers(1, 25, 2))
        pixels = rng.random((rng.integers(1, 4), height, width)) < rng.choice([0, 0.1, 0.5, 0.9, 1])
        for mask, parts in zip(pixels, polygons(Runs.from_pixels(pixels), single=one), strict=True):
            assert bool(parts) == mask.any()
            if one:
                assert len(parts) <= 1
            if parts:
                flat = [part.reshape(-1).tolist() for part in parts]
                found = pycocotools.merge(pycocotools.frPyObjects(flat, height, width))
                np.testing.assert_array_equal(pycocotools.decode(found), mask)


def test_a_hole_is_joined_to_its_part_and_parts_stay_separate():
    pixels = np.zeros((1, 8, 12), bool)
    pixels[0, 1:6, 1:6] = True
    pixels[0, 3, 3] = False
    pixels[0, 6:, 6:9] = True  # touches at a corner
    ring, square = polygons(Runs.from_pixels(pixels))[0]
    assert square.tolist() == [[6, 6], [9, 6], [9, 8], [6, 8]]
    assert len(ring) == 4 + 1 + 4 + 1 + 1
    assert polygons(Runs.from_pixels(pixels[:, :0:-1]))[0][0].dtype == np.int32
