"""Overlap of masks, on runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as pycocotools

import sa1b.masks
from tests.masks.samples import examples, pixel_masks, sides, to_runs


@st.composite
def two_lists(draw):
    height, width = st.just(draw(sides)), st.just(draw(sides))
    return draw(pixel_masks(height, width)), draw(pixel_masks(height, width)), draw(st.integers(0, 99))


@examples
@given(two_lists())
def test_intersection_counts_common_pixels(drawn):
    a, b, seed = drawn
    for zeros in (None, seed):
        common = sa1b.masks.intersection(to_runs(a, zeros), to_runs(b, zeros))
        assert common.dtype == np.int64
        np.testing.assert_array_equal(common, (a[:, None] & b[None]).sum(axis=(2, 3)))


@examples
@given(two_lists())
def test_iou_is_that_of_the_pixels_and_of_pycocotools_to_the_bit(drawn):
    a, b, seed = drawn
    common = (a[:, None] & b[None]).sum(axis=(2, 3))
    union = (a[:, None] | b[None]).sum(axis=(2, 3))
    expected = np.divide(common, union, out=np.zeros(common.shape), where=union > 0)
    np.testing.assert_array_equal(sa1b.masks.iou(to_runs(a, seed), to_runs(b, seed)), expected)
    if len(a) and len(b):
        coded = [
            [{"size": list(a.shape[1:]), "counts": string} for string in sa1b.masks.encode(to_runs(masks))]
            for masks in (a, b)
        ]
        np.testing.assert_array_equal(
            sa1b.masks.iou(to_runs(a), to_runs(b)), pycocotools.iou(*coded, [0] * len(b))
        )


def test_two_empty_masks_do_not_overlap():
    empty = to_runs(np.zeros((1, 3, 4), np.bool_))
    assert sa1b.masks.iou(empty, empty).tolist() == [[0.0]]


def test_images_of_different_sizes_are_refused():
    a, b = (to_runs(np.ones((1, *size), np.bool_)) for size in ((3, 4), (4, 3)))
    with pytest.raises(ValueError, match="3 x 4 and 4 x 3 pixels: .* must"):
        sa1b.masks.iou(a, b)
