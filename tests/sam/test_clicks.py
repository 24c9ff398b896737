"""Prompts: their positions and frequencies, and that those of a mask do not depend on other masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.masks.grid import framed_size
from sa1b.masks.raster_torch import inside_image
from sa1b.sam import clicks
from sa1b.sam.clicks import random_words
from sa1b.sam.iteration import first_prompts
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets

examples = settings(max_examples=60, deadline=None, derandomize=True)


def some_keys(count: int) -> torch.Tensor:
    return random_words(torch.zeros((), dtype=torch.int64), torch.arange(count))


@examples
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 80))
def test_a_pixel_is_in_the_image_where_its_centre_is(rows, columns, image_size, size):
    rows, columns = framed_size(rows, columns, image_size)
    found = inside_image(torch.tensor([[rows, columns]]), image_size, size)
    centres = (np.arange(size) + 0.5) / size * image_size
    np.testing.assert_array_equal(found[0], np.outer(centres < rows, centres < columns))


def test_points_lose_the_half_that_the_prompt_encoder_adds():
    points, labels = clicks.point_prompts(torch.tensor([[3.5, 7.25]]))
    assert points[:, 0].tolist() == [[3.0, 6.75]]
    assert labels.tolist() == [[clicks.FOREGROUND, clicks.NOTHING]]


def test_boxes_are_two_corners_and_lose_the_same_half():
    points, labels = clicks.box_prompts(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert points.tolist() == [[[0.5, 1.5], [2.5, 3.5]]]
    assert labels.tolist() == [[clicks.TOP_LEFT, clicks.BOTTOM_RIGHT]]


def test_point_and_box_come_with_the_chance_that_was_asked_for():
    count = 20_000
    nothing, image = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
    points, boxes = torch.full((count, 2), 5.0), torch.tensor([[1.0, 2, 8, 9]]).expand(count, 4)
    targets = Targets(nothing, boxes, points, image, nothing, some_keys(count), torch.tensor([[16, 16]]))
    found = {x: first_prompts(Recipe(box_probability=x, box_noise=0), targets, 16) for x in (0.0, 0.5, 1.0)}
    prompts, labels = found[0.5]
    boxed = labels[:, 0] == clicks.TOP_LEFT
    assert abs(boxed.double().mean() - 0.5) < 0.015
    near, corners = clicks.point_prompts(points), clicks.box_prompts(boxes)
    for chosen, (expected_points, expected_labels) in ((~boxed, near), (boxed, corners)):
        assert torch.equal(prompts[chosen], expected_points[chosen])
        assert torch.equal(labels[chosen], expected_labels[chosen])
    assert (found[0.0][1][:, 0] == clicks.FOREGROUND).all()
    assert (found[1.0][1][:, 0] == clicks.TOP_LEFT).all()


def test_box_noise_has_its_deviation_and_its_limit():
    count = 20_000
    boxes = torch.tensor([[300.0, 400.0, 400.0, 900.0]]).expand(count, 4)
    sizes = torch.full((count, 2), 1024)
    moved = clicks.noised_boxes(boxes, some_keys(count), sizes, 0.1, 1e9) - boxes
    deviations = torch.tensor([10.0, 50.0, 10.0, 50.0])
    torch.testing.assert_close(moved.std(dim=0), deviations, rtol=0.03, atol=0)
    assert (moved.mean(dim=0).abs() < deviations / 25).all()
    assert (torch.corrcoef(moved.T) - torch.eye(4)).abs().max() < 0.04  # each side moves independently
    limited = clicks.noised_boxes(boxes, some_keys(count), sizes, 0.1, 20.0) - boxes
    torch.testing.assert_close(limited, moved.clamp(-20, 20), rtol=0, atol=1e-3)


def test_uniform_box_noise_fills_its_range():
    count = 20_000
    boxes = torch.tensor([[300.0, 400.0, 400.0, 900.0]]).expand(count, 4)
    sizes = torch.full((count, 2), 1024)
    moved = clicks.noised_boxes(boxes, some_keys(count), sizes, 0.1, 20.0, uniform=True) - boxes
    largest = torch.tensor([10.0, 20.0, 10.0, 20.0])
    assert (moved.abs() <= largest + 1e-3).all()
    torch.testing.assert_close(moved.std(dim=0), largest / 3**0.5, rtol=0.03, atol=0)


def test_noised_boxes_stay_in_the_image_and_keep_their_corners_in_order():
    count = 5000
    boxes = torch.tensor([[0.0, 1.0, 30.0, 20.0]]).expand(count, 4)
    sizes = torch.tensor([[20, 30]]).expand(count, 2)
    x0, y0, x1, y1 = clicks.noised_boxes(boxes, some_keys(count), sizes, 0.6, 1e9).T
    assert ((x0 >= 0) & (x0 <= x1) & (x1 <= 30)).all()
    assert ((y0 >= 0) & (y0 <= y1) & (y1 <= 20)).all()


def test_one_round_without_a_prompt_lies_anywhere_among_the_clicks_and_one_is_the_last():
    rests = clicks.unprompted_iterations(some_keys(9000), 8, 2)
    assert rests.shape == (9000, 10)
    assert (rests.sum(dim=1) == 2).all()
    assert rests[:, -1].all()
    counts = rests[:, :-1].sum(dim=0).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 32  # 8 degrees of freedom: probability 1e-4


@pytest.mark.parametrize(("count", "unprompted"), [(0, 0), (0, 1), (3, 0), (3, 1), (3, 3), (0, 2)])
def test_as_many_rounds_rest_as_the_recipe_says(count, unprompted):
    rests = clicks.unprompted_iterations(some_keys(50), count, unprompted)
    assert rests.shape == (50, count + unprompted)
    assert (rests.sum(dim=1) == unprompted).all()
    assert unprompted == 0 or rests[:, -1].all()


@examples
@given(st.integers(0, 6), st.integers(1, 7), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**32))
def test_a_picked_pixel_is_one_of_the_region(count, height, width, density, seed):
    torch.manual_seed(seed)
    regions = torch.rand(count, height, width) < density
    words = random_words(torch.tensor(seed), torch.arange(count))
    rows, columns, counts = clicks.uniform_pixels(regions, words)
    assert torch.equal(counts, regions.sum(dim=(1, 2)))
    for mask, word, row, column in zip(regions, words.tolist(), rows, columns, strict=True):
        pixels = mask.nonzero()
        if len(pixels):
            assert pixels[(word % 2**64 >> 1) % len(pixels)].tolist() == [row, column]
        else:
            assert [row, column] == [height - 1, width - 1]


def test_every_pixel_of_a_region_is_as_likely_as_another():
    region = torch.rand(5, 8, generator=torch.Generator().manual_seed(2)) < 0.4
    words = some_keys(20_000)
    rows, columns, _ = clicks.uniform_pixels(region.expand(len(words), 5, 8), words)
    hits = torch.bincount(rows * 8 + columns, minlength=40).reshape(5, 8)
    assert (hits[~region] == 0).all()
    expected = len(words) / region.sum()
    assert (
        (hits[region] - expected) ** 2 / expected
    ).sum() < 45  # at most 20 degrees of freedom: probability 1e-3


def clicked(masks, targets, number=1, image_size=16, keys=None):
    keys = some_keys(len(masks)) if keys is None else keys
    return clicks.corrective_clicks(masks, targets, keys, number, image_size)


def test_a_masks_prompts_are_the_same_in_whatever_batch():
    count, order = 30, torch.randperm(30, generator=torch.Generator().manual_seed(0))[:11]
    torch.manual_seed(0)
    masks, targets = torch.rand(2, count, 12, 12) < 0.3
    keys, sizes = some_keys(count), torch.full((count, 2), 16)
    boxes = torch.tensor([[2.0, 3.0, 9.0, 11.0]]).expand(count, 4) * torch.rand(count, 1)
    pairs = [
        (clicked(masks, targets, keys=keys), clicked(masks[order], targets[order], keys=keys[order])),
        (
            (clicks.noised_boxes(boxes, keys, sizes, 0.1, 2.0),),
            (clicks.noised_boxes(boxes[order], keys[order], sizes[order], 0.1, 2.0),),
        ),
        ((clicks.unprompted_iterations(keys, 8, 2),), (clicks.unprompted_iterations(keys[order], 8, 2),)),
    ]
    for together, alone in pairs:
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[order], other)
