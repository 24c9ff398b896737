"""Runs to pixels on the CPU and in torch, compared with decoding and integer indexing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as pycocotools

import sa1b.masks
from sa1b.masks import Runs, SizeError, grid, raster, raster_torch
from tests.masks.samples import examples, masks_and_runs, pixel_masks, to_pixels, to_runs
from tests.masks.test_geometry import read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
targets = st.one_of(st.integers(1, 10), st.integers(1, 70))
TORCH_TYPES = {np.uint8: torch.uint8, np.bool_: torch.bool}


def tensors(runs):
    return torch.from_numpy(runs.runs.astype(np.int64)), torch.from_numpy(runs.offsets)


@examples
@given(masks_and_runs, targets, targets, st.sampled_from([np.uint8, np.bool_]))
def test_raster_reads_the_pixels_of_the_grid(drawn, height, width, dtype):
    masks, runs = drawn
    expected = read(masks, grid.resized((runs.height, runs.width), (height, width)))
    pixels = raster.rasterize(runs, height, width, dtype=dtype)
    assert pixels.dtype == dtype
    np.testing.assert_array_equal(pixels, expected)
    in_torch = raster_torch.rasterize(
        *tensors(runs), runs.height, runs.width, height, width, dtype=TORCH_TYPES[dtype]
    )
    assert in_torch.dtype == TORCH_TYPES[dtype]
    np.testing.assert_array_equal(in_torch, expected)


@examples
@given(masks_and_runs, targets, targets, st.sampled_from([np.uint8, np.bool_]))
def test_the_frame_reads_the_pixels_of_its_formula(drawn, image_size, size, dtype):
    masks, runs = drawn
    expected = read(masks, grid.framed((runs.height, runs.width), image_size, size))
    pixels = raster.rasterize_frame(runs, image_size, size, dtype=dtype)
    assert pixels.dtype == dtype
    np.testing.assert_array_equal(pixels, expected)
    in_torch = raster_torch.rasterize_frame(
        *tensors(runs), runs.height, runs.width, image_size, size, dtype=TORCH_TYPES[dtype]
    )
    assert in_torch.dtype == TORCH_TYPES[dtype]
    np.testing.assert_array_equal(in_torch, expected)


@examples
@given(masks_and_runs, targets, targets, st.data())
def test_an_image_that_takes_any_part_of_the_square_reads_by_the_same_formula(drawn, image_size, size, data):
    masks, runs = drawn
    taken = data.draw(st.tuples(st.integers(1, image_size), st.integers(1, image_size)))
    wide = [
        ((2 * np.arange(size) + 1) * image_size * source) // (2 * size * length)
        for source, length in zip(masks.shape[1:], taken, strict=True)
    ]
    shown = np.pad(masks, ((0, 0), (0, 1), (0, 1)))  # one pixel of background after the last one
    rows, columns = (np.minimum(line, n) for line, n in zip(wide, masks.shape[1:], strict=True))
    expected = shown[:, rows[:, None], columns]
    np.testing.assert_array_equal(raster.rasterize_frame(runs, image_size, size, taken=taken), expected)
    in_torch = raster_torch.rasterize_frame(
        *tensors(runs),
        runs.height,
        runs.width,
        image_size,
        size,
        taken=torch.tensor([taken] * len(runs)).reshape(-1, 2).long(),
    )
    np.testing.assert_array_equal(in_torch, expected)
    np.testing.assert_array_equal(to_pixels(sa1b.masks.frame(runs, image_size, size, taken)), expected)


def test_an_image_larger_than_the_square_is_refused():
    runs = to_runs(np.ones((1, 3, 4), np.bool_))
    for taken in ((0, 4), (4, 9)):
        with pytest.raises(ValueError, match="into the square of 8"):
            raster.rasterize_frame(runs, 8, 8, taken=taken)


@examples
@given(st.lists(masks_and_runs, min_size=1, max_size=6), targets, targets)
def test_pixels_that_are_drawn_on_again_need_clearing_only_in_their_boxes(drawings, image_size, size):
    most = max(len(runs) for _, runs in drawings)
    canvas, boxes = np.zeros((most, size, size), np.uint8), np.zeros((most, 4), np.int64)
    for _, runs in drawings:
        count = len(runs)
        raster.rasterize_frame(runs, image_size, size, out=canvas[:count], boxes=boxes[:count])
        np.testing.assert_array_equal(canvas[:count], raster.rasterize_frame(runs, image_size, size))
        for picture, (top, bottom, left, right) in zip(canvas, boxes, strict=True):
            assert picture.sum() == picture[top:bottom, left:right].sum()


def test_runs_of_another_image_leave_nothing_outside_of_their_boxes():
    random = np.random.default_rng(5)
    canvas, boxes = np.zeros((1, 9, 9), np.uint8), np.zeros((1, 4), np.int64)
    for _ in range(300):
        wrong = random.integers(0, 40, random.integers(1, 9)).astype(np.uint32)
        runs = Runs(
            wrong, np.array([0, len(wrong)]), int(random.integers(1, 12)), int(random.integers(1, 12))
        )
        raster.rasterize_frame(runs, 9, 9, out=canvas, boxes=boxes)
        outside = canvas[0].copy()
        outside[boxes[0, 0] : boxes[0, 1], boxes[0, 2] : boxes[0, 3]] = 0
        assert not outside.any()


def test_boxes_of_another_shape_or_type_are_refused():
    runs = to_runs(np.ones((2, 3, 4), np.bool_))
    for boxes in (np.zeros((1, 4), np.int64), np.zeros((2, 4), np.int32)):
        with pytest.raises(ValueError, match=r"boxes must be int64 \[2, 4\], got"):
            raster.rasterize_frame(runs, 8, 8, boxes=boxes)


@examples
@given(pixel_masks())
def test_the_source_size_is_what_pycocotools_decodes(masks):
    runs = to_runs(masks)
    coded = [{"size": list(masks.shape[1:]), "counts": string} for string in sa1b.masks.encode(runs)]
    pixels = raster.rasterize(runs)
    for i, mask in enumerate(coded):
        np.testing.assert_array_equal(pixels[i], pycocotools.decode(mask))
    np.testing.assert_array_equal(pixels, to_pixels(runs))


@examples
@given(masks_and_runs, targets, targets)
def test_raster_and_runs_agree_on_resize_and_frame(drawn, height, width):
    _, runs = drawn
    np.testing.assert_array_equal(
        raster.rasterize(runs, height, width), raster.rasterize(sa1b.masks.resize(runs, height, width))
    )
    np.testing.assert_array_equal(
        raster.rasterize_frame(runs, height, width), raster.rasterize(sa1b.masks.frame(runs, height, width))
    )


@examples
@given(masks_and_runs, targets, st.data())
def test_chosen_masks_in_a_used_buffer(drawn, size, data):
    masks, runs = drawn
    chosen = data.draw(st.lists(st.integers(0, len(masks) - 1))) if len(masks) else []
    expected = read(masks, grid.resized((runs.height, runs.width), (size, size)))[np.array(chosen, np.int64)]
    buffer = np.full((len(chosen), size, size), 255, np.uint8)
    assert raster.rasterize(runs, size, size, select=chosen, out=buffer) is buffer
    np.testing.assert_array_equal(buffer, expected)
    reused = torch.full((len(chosen), size, size), 255, dtype=torch.uint8)
    picked = runs.select(chosen)
    got = raster_torch.rasterize(*tensors(picked), runs.height, runs.width, size, size, out=reused)
    assert got is reused
    np.testing.assert_array_equal(got, expected)


@examples
@given(st.lists(masks_and_runs, min_size=1, max_size=4), targets, targets)
def test_torch_fills_masks_of_images_of_different_sizes_at_once(batch, image_size, size):
    images = [runs for _, runs in batch]
    runs = torch.from_numpy(np.concatenate([image.runs for image in images]).astype(np.int64))
    counts = np.concatenate([np.diff(image.offsets) for image in images])
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))
    heights = torch.tensor([image.height for image in images for _ in range(len(image))], dtype=torch.int64)
    widths = torch.tensor([image.width for image in images for _ in range(len(image))], dtype=torch.int32)
    framed = np.concatenate([raster.rasterize_frame(image, image_size, size) for image in images])
    found = raster_torch.rasterize_frame(runs, offsets, heights, widths, image_size, size)
    np.testing.assert_array_equal(found, framed)
    np.testing.assert_array_equal(
        raster_torch.rasterize(runs, offsets, heights, widths, image_size, size),
        np.concatenate([raster.rasterize(image, image_size, size) for image in images]),
    )


@pytest.mark.parametrize("kind", [np.uint32, np.int32, np.int64])
def test_torch_takes_any_integers(kind):
    masks = np.arange(60).reshape(1, 6, 10) % 7 < 3
    runs = to_runs(masks)
    got = raster_torch.rasterize(
        torch.from_numpy(runs.runs.astype(kind)), torch.from_numpy(runs.offsets), 6, 10, 6, 10
    )
    np.testing.assert_array_equal(got, masks)


def test_torch_writes_a_buffer_that_is_not_aligned_to_words():
    masks = np.arange(6 * 16).reshape(1, 6, 16) % 7 < 3
    memory = torch.zeros(6 * 16 + 3, dtype=torch.uint8)
    out = memory[3:].view(1, 6, 16)
    raster_torch.rasterize(*tensors(to_runs(masks)), 6, 16, 6, 16, out=out)
    np.testing.assert_array_equal(out, masks)


def test_a_wrong_buffer_is_named():
    runs = to_runs(np.ones((2, 3, 4), np.bool_))
    for out, message in (
        (np.zeros((2, 4, 3), np.uint8), r"out must be .*\[2, 3, 4\], got \[2, 4, 3\]"),
        (np.zeros((2, 3, 4), np.int8), "must be uint8 or bool, got int8"),
        (np.zeros((2, 3, 8), np.uint8)[:, :, ::2], "out must be C-contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            raster.rasterize(runs, out=out)


def test_other_arguments_are_checked():
    runs = to_runs(np.ones((2, 3, 4), np.bool_))
    with pytest.raises(ValueError, match="must be uint8 or bool, got float32"):
        raster.rasterize(runs, dtype=np.float32)
    with pytest.raises(IndexError):
        raster.rasterize(runs, select=[2])
    for size in ((0, 4), (3, -1), (2.5, 3)):
        with pytest.raises(SizeError):
            raster.rasterize(runs, *size)
        with pytest.raises(SizeError):
            raster_torch.rasterize(*tensors(runs), 3, 4, *size)
        with pytest.raises(SizeError):
            raster_torch.rasterize_frame(*tensors(runs), 3, 4, *size)


def test_runs_that_break_their_promise_write_nothing_outside_the_buffer():
    memory = np.full(3 * 12, 9, np.uint8)
    runs = Runs(np.array([1, 5, 2**32 - 1, 2**32 - 1, 3], np.uint32), np.array([0, 5]), 3, 4)
    raster.rasterize(runs, out=memory[12:24].reshape(1, 3, 4))
    assert (memory[:12] == 9).all()
    assert (memory[24:] == 9).all()


@examples
@given(masks_and_runs, targets, targets)
def test_a_flip_of_one_value_serves_all_masks(drawn, height, width):
    masks, runs = drawn
    expected = read(masks[:, :, ::-1], grid.resized((runs.height, runs.width), (height, width)))
    for flip in (True, torch.ones(1, dtype=torch.bool), torch.ones(len(masks), dtype=torch.bool)):
        found = raster_torch.rasterize(*tensors(runs), runs.height, runs.width, height, width, flip=flip)
        np.testing.assert_array_equal(found, expected)
