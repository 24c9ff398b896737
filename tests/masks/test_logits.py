"""Masks from logits compared with dense masks that torch enlarges; suppression compared with its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import sa1b.masks
from sa1b.kernel import plain
from sa1b.masks import Runs, SizeError, pixel_kernels, raster, shape_kernels
from sa1b.masks.grid import framed_size
from sa1b.masks.raster import areas, logit_axis, runs_of_logits
from sa1b.masks.runs import joined
from tests.masks.samples import assert_canonical, examples


def logits_of(seed: int, count: int, side: int) -> np.ndarray:
    """Discs with noise, empty masks and full ones."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    at = random.uniform(-0.2, 1.2, (2, count, 1, 1))
    discs = random.uniform(0.05, 1, (count, 1, 1)) - np.hypot(x - at[0], y - at[1])
    return (random.uniform(1, 20, (count, 1, 1)) * discs + random.normal(0, 0.4, discs.shape)).astype(
        np.float32
    )


def enlarged(logits: np.ndarray, height: int, width: int, size: int) -> np.ndarray:
    """Logits at the pixels of the image, as in the published model."""
    rows, columns = framed_size(height, width, size)
    large = functional.interpolate(torch.from_numpy(logits)[:, None], (size, size), mode="bilinear")
    cut = large[..., :rows, :columns]
    return functional.interpolate(cut, (height, width), mode="bilinear")[:, 0].numpy()


@examples
@given(
    st.integers(0, 2**16),
    st.sampled_from([(64, 16), (64, 32), (32, 32), (48, 12)]),
    st.integers(1, 150),
    st.integers(1, 150),
)
def test_runs_and_areas_are_those_of_enlarged_logits(seed, sizes, height, width):
    size, side = sizes
    logits, taken = logits_of(seed, 4, side), framed_size(height, width, size)
    rows = logit_axis(height, taken[0], size, side)
    columns = logit_axis(width, taken[1], size, side)
    dense = enlarged(logits, height, width, size)
    unsure = 1e-4  # torch computes positions in float32
    counted = areas(logits, rows, columns, 1.0)
    for column, threshold in enumerate((0.0, 1.0, -1.0)):
        assert (counted[:, column] >= (dense > threshold + unsure).sum(axis=(1, 2))).all()
        assert (counted[:, column] <= (dense > threshold - unsure).sum(axis=(1, 2))).all()
    chosen = [2, 0, 2]
    runs = runs_of_logits(logits, chosen, rows, columns)
    assert_canonical(runs)
    pixels = raster.rasterize(runs, dtype=np.bool_)
    assert np.array_equal(pixels, pixels & (dense[chosen] > -unsure))
    assert np.array_equal(pixels, pixels | (dense[chosen] > unsure))
    assert np.array_equal(pixels.sum(axis=(1, 2)), counted[chosen, 0])
    moved = runs_of_logits(logits, chosen, rows, columns, position=(5, 3), image=(height + 4, width + 9))
    assert_canonical(moved)
    padded = np.pad(pixels, ((0, 0), (3, 1), (5, 4)))
    assert np.array_equal(raster.rasterize(moved, dtype=np.bool_), padded)


def test_no_masks_and_positions_outside_of_the_image():
    axis = logit_axis(10, 16, 16, 4)
    nothing = np.zeros((0, 4, 4), np.float32)
    assert areas(nothing, axis, axis, 1.0).shape == (0, 3)
    assert len(runs_of_logits(nothing, [], axis, axis)) == 0
    one = np.full((1, 4, 4), np.nan, np.float32)
    assert areas(one, axis, axis, 1.0).tolist() == [[0, 0, 0]]
    for position, image in (((1, 0), None), ((0, -1), (20, 20)), ((11, 0), (20, 20))):
        with pytest.raises(ValueError, match="must be inside the image"):
            runs_of_logits(one, [0], axis, axis, position=position, image=image)
    with pytest.raises(SizeError):
        runs_of_logits(one, [0], axis, axis, image=(0, 20))


def test_kernels_do_the_same_compiled_and_plain():
    logits, rows, columns = logits_of(1, 3, 8), logit_axis(21, 25, 32, 8), logit_axis(27, 32, 32, 8)
    axes = [(axis.reads, axis.weights, axis.starts, axis.stops) for axis in (rows, columns)]
    made = []
    for kernel in (pixel_kernels.enlarge, plain(pixel_kernels.enlarge)):
        found = [np.zeros((3, 3), np.int64), np.zeros(2000, np.uint32), np.zeros(4, np.int64)]
        kernel(logits, np.arange(3), *axes[0], *axes[1], 2, 1, 25, 30, 0.5, *found)
        made.append(found)
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)
    boxes = np.random.default_rng(0).integers(0, 9, (40, 4)).astype(np.float64)
    kept = [np.zeros(40, np.bool_), np.zeros(40, np.bool_)]
    for kernel, out in zip((shape_kernels.suppress, plain(shape_kernels.suppress)), kept, strict=True):
        kernel(boxes, 0.4, out)
    np.testing.assert_array_equal(*kept)


def box_iou(a: np.ndarray, b: np.ndarray) -> float:
    across = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    down = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    common = max(across, 0) * max(down, 0)
    union = a[2] * a[3] + b[2] * b[3] - common
    return common / union if union else float((a == b).all())


@examples
@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_suppression_leaves_the_best_of_boxes_that_overlap(seed, max_iou):
    random = np.random.default_rng(seed)
    boxes, scores = random.integers(0, 6, (20, 4)), random.integers(0, 8, 20)
    kept: list[int] = []
    for index in sorted(range(20), key=lambda i: -scores[i]):
        if all(box_iou(boxes[index], boxes[other]) <= max_iou for other in kept):
            kept.append(index)
    assert sa1b.masks.suppress(boxes, scores, max_iou).tolist() == kept


def test_suppression_refuses_other_shapes():
    assert sa1b.masks.suppress(np.empty((0, 4)), [], 0.5).shape == (0,)
    for boxes, scores in (([[1, 2, 3]], [1]), ([[1, 2, 3, 4]], [1, 2])):
        with pytest.raises(ValueError, match=r"boxes must be \[N, 4\] and scores \[N\]"):
            sa1b.masks.suppress(boxes, scores, 0.5)


def test_lists_of_masks_are_joined():
    one = Runs(np.array([2, 4, 6, 0], np.uint32), np.array([0, 3, 4], np.int64), 3, 4)
    both = joined([one, one], 3, 4)
    assert both.offsets.tolist() == [0, 3, 4, 7, 8]
    assert len(joined([], 3, 4).check()) == 0
    with pytest.raises(ValueError, match="must be of 4 x 3"):
        joined([one], 4, 3)
