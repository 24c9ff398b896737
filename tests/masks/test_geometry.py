"""Geometry on runs compared with the same operations on pixels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as pycocotools

import sa1b.masks
from sa1b.masks import SizeError, grid
from tests.masks.samples import assert_canonical, examples, masks_and_runs, pixel_masks, to_pixels, to_runs


def box_of_pixels(mask):
    ys, xs = np.nonzero(mask)
    return [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1] if len(xs) else [0, 0, 0, 0]


def check(runs, expected):
    assert_canonical(runs)
    assert (runs.height, runs.width) == expected.shape[1:]
    np.testing.assert_array_equal(to_pixels(runs), expected)


def read(masks, axes):
    """Source pixels by integer indexing; -1 is background."""
    rows, columns = (axis.sources() for axis in axes)
    inside = (rows >= 0)[:, None] & (columns >= 0)
    return masks[:, rows[:, None], columns] & inside


@examples
@given(masks_and_runs)
def test_area(drawn):
    masks, runs = drawn
    areas = sa1b.masks.area(runs)
    assert areas.dtype == np.int64
    np.testing.assert_array_equal(areas, masks.sum(axis=(1, 2)))


@examples
@given(masks_and_runs)
def test_boxes_are_those_of_the_pixels(drawn):
    masks, runs = drawn
    expected = np.array([box_of_pixels(mask) for mask in masks], np.int64).reshape(-1, 4)
    boxes = sa1b.masks.bbox(runs)
    assert boxes.dtype == np.int64
    np.testing.assert_array_equal(boxes, expected)
    expected[:, 2:] -= expected[:, 2:] > 0
    np.testing.assert_array_equal(sa1b.masks.bbox_sa1b(runs), expected)


@examples
@given(pixel_masks())
def test_area_and_boxes_are_those_of_pycocotools_for_canonical_runs(masks):
    runs = to_runs(masks)
    coded = [{"size": list(masks.shape[1:]), "counts": string} for string in sa1b.masks.encode(runs)]
    np.testing.assert_array_equal(sa1b.masks.area(runs), pycocotools.area(coded))
    if coded:
        np.testing.assert_array_equal(sa1b.masks.bbox(runs), pycocotools.toBbox(coded))


@examples
@given(masks_and_runs, st.data())
def test_crop(drawn, data):
    masks, runs = drawn
    x, y = data.draw(st.integers(0, runs.width - 1)), data.draw(st.integers(0, runs.height - 1))
    width, height = data.draw(st.integers(1, runs.width - x)), data.draw(st.integers(1, runs.height - y))
    check(sa1b.masks.crop(runs, x, y, width, height), masks[:, y : y + height, x : x + width])


def test_a_window_outside_the_image_is_refused():
    runs = to_runs(np.ones((1, 4, 5), np.bool_))
    for window in ((-1, 0, 2, 2), (0, -1, 2, 2), (4, 0, 2, 2), (0, 3, 2, 2), (0, 0, 6, 1), (2**63, 0, 1, 1)):
        with pytest.raises(ValueError, match="must be inside"):
            sa1b.masks.crop(runs, *window)
    with pytest.raises(SizeError):
        sa1b.masks.crop(runs, 0, 0, 0, 1)


@examples
@given(masks_and_runs)
def test_flips(drawn):
    masks, runs = drawn
    check(sa1b.masks.flip_horizontal(runs), masks[:, :, ::-1])
    check(sa1b.masks.flip_vertical(runs), masks[:, ::-1, :])


@examples
@given(masks_and_runs, st.integers(1, 60), st.integers(1, 60))
def test_resize(drawn, height, width):
    masks, runs = drawn
    check(
        sa1b.masks.resize(runs, height, width),
        read(masks, grid.resized((runs.height, runs.width), (height, width))),
    )


@examples
@given(masks_and_runs)
def test_the_same_size_gives_the_canonical_form(drawn):
    masks, runs = drawn
    check(sa1b.masks.resize(runs, runs.height, runs.width), masks)


@examples
@given(masks_and_runs, st.integers(1, 60), st.integers(1, 60))
def test_frame(drawn, image_size, size):
    masks, runs = drawn
    check(
        sa1b.masks.frame(runs, image_size, size),
        read(masks, grid.framed((runs.height, runs.width), image_size, size)),
    )
