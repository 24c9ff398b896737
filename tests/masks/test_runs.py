"""The class Runs."""

import json
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

import sa1b.masks
from sa1b import masks
from sa1b.masks import MaskError, Runs, SizeError, coco, raster
from sa1b.masks.raster import logit_axis, runs_of_logits
from tests.masks.samples import assert_same, examples, masks_and_runs, pixel_masks, to_pixels, to_runs


def pair(runs, offsets, height=2, width=3):
    return Runs(np.array(runs, np.uint32), np.array(offsets, np.int64), height, width)


@examples
@given(masks_and_runs, st.data())
def test_select_takes_masks_in_the_order_asked_for(drawn, data):
    masks, runs = drawn
    if len(masks):
        indices = data.draw(st.lists(st.integers(-len(masks), len(masks) - 1)))
        np.testing.assert_array_equal(to_pixels(runs.select(indices)), masks[np.array(indices, np.int64)])
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks))), np.bool_)
    chosen = runs.select(keep)
    np.testing.assert_array_equal(to_pixels(chosen), masks[keep])
    chosen.runs[:] = 7  # a copy
    runs.check()


def test_select_refuses_what_is_not_there():
    runs = to_runs(np.zeros((2, 3, 4), np.bool_))
    for wrong in ([2], [-3], np.array([True]), np.array([], np.bool_)):
        with pytest.raises(IndexError):
            runs.select(wrong)


@examples
@given(pixel_masks())
def test_iteration_gives_each_mask(masks):
    runs = to_runs(masks)
    assert len(list(runs)) == len(runs) == len(masks)
    assert_same(runs.check(), runs)


def test_check_refuses_what_the_class_does_not_promise():
    pair([6, 1, 5], [0, 1, 3]).check()
    with pytest.raises(MaskError, match="mask 1: runs add up to 5 pixels instead of 2 x 3"):
        pair([6, 1, 4], [0, 1, 3]).check()
    for offsets in ([0, 2], [1, 3], [0, 3, 1, 3], []):
        with pytest.raises(ValueError, match="offsets"):
            pair([6, 1, 5], offsets).check()
    with pytest.raises(ValueError, match="runs must be uint32"):
        Runs(np.array([6], np.int64), np.array([0, 1]), 2, 3).check()
    with pytest.raises(SizeError):
        pair([0], [0, 1], 0, 3).check()
    with pytest.raises(MaskError):  # the sum would be 6 in 32-bit arithmetic
        pair([2**32 - 1, 7], [0, 2]).check()


def test_to_coco_gives_the_dicts_of_pycocotools_and_decode_takes_them_back() -> None:
    pixels = np.random.default_rng(5).random((4, 17, 23)) < 0.4
    pixels[1], pixels[2] = False, True
    runs = Runs.from_pixels(pixels)
    expected = coco_mask.encode(np.asfortranarray(pixels.transpose(1, 2, 0).astype(np.uint8)))
    found = runs.to_coco()
    assert found == [{"size": [17, 23], "counts": mask["counts"]} for mask in expected]
    np.testing.assert_array_equal(coco_mask.decode(found), pixels.transpose(1, 2, 0))
    texts = json.loads(json.dumps(runs.to_coco(text=True)))
    assert [mask["counts"].encode() for mask in texts] == [mask["counts"] for mask in found]
    for written in (found, texts):
        back = sa1b.masks.decode([mask["counts"] for mask in written], 17, 23)
        np.testing.assert_array_equal(back.runs, runs.runs)
        np.testing.assert_array_equal(back.offsets, runs.offsets)
    assert runs.select([]).to_coco() == []


def test_the_package_gives_the_names_of_its_modules():
    modules = [import_module(f"sa1b.masks.{name}") for name in ("coco", "geometry", "grid", "raster", "runs")]
    for name in masks.__all__:
        assert any(getattr(masks, name) is getattr(module, name, None) for module in modules)
    with pytest.raises(AttributeError, match=r"'sa1b\.masks' has no attribute 'nothing'"):
        _ = masks.nothing


def test_numbers_of_masks_are_integers_or_a_choice_for_each():
    runs = to_runs(np.ones((3, 2, 2), np.bool_))
    assert runs.indices([]).tolist() == []
    assert runs.indices([2, 0]).tolist() == [2, 0]
    assert runs.indices([True, False, True]).tolist() == [0, 2]
    for wrong in ([0.5], [True], [3]):
        with pytest.raises(IndexError):
            runs.indices(wrong)


@pytest.mark.parametrize(
    "wrong", [[0.0], [1.5, 2], ["1"], [None], [True], [3], [-4], np.array([0, 2**63], np.uint64)]
)
def test_indices_are_integers_or_bool_everywhere(wrong):
    runs = Runs.from_pixels(np.repeat(np.eye(3, dtype=bool)[:, :, None], 4, axis=2))
    strings = [one["counts"] for one in runs.to_coco()]
    text, lengths = np.frombuffer(b"".join(strings), np.uint8), np.array([len(one) for one in strings])
    logits = np.ones((3, 4, 4), np.float32)
    rows, columns = logit_axis(3, 3, 4, 4), logit_axis(4, 4, 4, 4)
    for select in (
        runs.select,
        lambda chosen: coco.decode_selected(text, lengths, chosen, 3, 4),
        lambda chosen: runs_of_logits(logits, chosen, rows, columns),
        lambda chosen: raster.rasterize(runs, select=chosen),
    ):
        with pytest.raises(IndexError, match="indices must be"):
            select(wrong)
        for chosen in ([1, 2], np.array([1, -1]), np.array([False, True, True])):
            assert len(select(chosen)) == 2
