"""Points and masks, on runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sa1b.masks
from sa1b.masks import geometry
from tests.masks.samples import examples, masks_and_runs, to_runs


@examples
@given(masks_and_runs)
def test_contains_reads_the_pixel_and_is_false_outside(drawn):
    masks, runs = drawn
    padded = np.pad(masks, ((0, 0), (2, 2), (2, 2)))
    for y in range(-2, runs.height + 2):
        for x in range(-2, runs.width + 2) if runs.height * runs.width < 100 else (-1, 0, runs.width - 1):
            inside = sa1b.masks.contains(runs, np.full((len(runs), 2), (x, y)))
            assert inside.dtype == np.bool_
            np.testing.assert_array_equal(inside, padded[:, y + 2, x + 2])


def test_points_far_outside_are_outside():
    runs = to_runs(np.ones((1, 3, 4), np.bool_))
    for far in (2**31, 2**62, 2**63 - 1, -(2**63)):
        assert not sa1b.masks.contains(runs, np.array([[far, 0]]))[0]
        assert not sa1b.masks.contains(runs, np.array([[0, far]]))[0]
    assert not sa1b.masks.contains(runs, np.array([[2**64 - 1, 0]], np.uint64))[0]


@examples
@given(masks_and_runs)
def test_foreground_pixels_are_counted_down_the_columns(drawn):
    masks, runs = drawn
    listed = [np.argwhere(mask.T) for mask in masks]  # (x, y)
    for n in (
        0,
        1,
        7,
        *(len(pixels) - 1 for pixels in listed),
        *(len(pixels) for pixels in listed),
        -1,
        2**40,
    ):
        expected = [pixels[n] if 0 <= n < len(pixels) else (-1, -1) for pixels in listed]
        found = sa1b.masks.nth_foreground(runs, np.full(len(runs), n))
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.array(expected, np.int64).reshape(-1, 2))


@examples
@given(masks_and_runs, st.integers(0, 2**64 - 1))
def test_a_uniform_point_is_the_draw_times_the_area(drawn, draw):
    masks, runs = drawn
    found = sa1b.masks.uniform_point(runs, np.full(len(runs), draw, np.uint64))
    for mask, point in zip(masks, found.tolist(), strict=True):
        pixels = np.argwhere(mask.T).tolist()
        assert point == (pixels[draw * len(pixels) >> 64] if pixels else [-1, -1])


@examples
@given(masks_and_runs, st.integers(0, 2**32), st.floats(0.01, 9), st.floats(0.01, 9))
def test_boxes_points_and_areas_in_one_call_are_those_of_three(drawn, seed, across, down):
    _, runs = drawn
    words = np.random.default_rng(seed).integers(0, 2**64, len(runs), np.uint64)
    boxes, inside, areas = geometry.boxes_and_points(runs, words, (across, down))
    corners = sa1b.masks.bbox_sa1b(runs)
    corners[:, 2:] += corners[:, :2]
    scale = np.array([across, down])
    np.testing.assert_array_equal(boxes, ((corners + 0.5) * np.tile(scale, 2)).astype(np.float32))
    one = sa1b.masks.uniform_point(runs, words)
    np.testing.assert_array_equal(inside, ((one + 0.5) * scale).astype(np.float32))
    np.testing.assert_array_equal(areas, sa1b.masks.area(runs))
    with pytest.raises(ValueError, match="words must be uint64"):
        geometry.boxes_and_points(runs, words.astype(np.int64), (across, down))


def test_draws_reach_every_pixel_equally():
    runs = to_runs(np.ones((1, 2, 3), np.bool_))
    draws = np.arange(6000, dtype=np.uint64) * np.uint64(2**64 // 6000)
    found = np.concatenate([sa1b.masks.uniform_point(runs, draws[i : i + 1]) for i in range(0, 6000)])
    _, counts = np.unique(found, axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.ptp(counts) <= 2


def test_arguments_of_another_kind_are_refused():
    runs = to_runs(np.ones((2, 3, 4), np.bool_))
    with pytest.raises(ValueError, match="points must be integers"):
        sa1b.masks.contains(runs, np.zeros((2, 2)))
    with pytest.raises(ValueError, match="points must be integers"):
        sa1b.masks.contains(runs, np.zeros((1, 2), np.int64))
    with pytest.raises(ValueError, match="n must be integers"):
        sa1b.masks.nth_foreground(runs, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="words must be uint64"):
        sa1b.masks.uniform_point(runs, np.zeros(2, np.int64))
