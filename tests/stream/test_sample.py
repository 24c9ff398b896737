"""One sample: boxes and points in the frame of the published model."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from sa1b.sam import clicks
from sa1b.stream.sample import SampleOptions, pick_masks
from tests.sam import published
from tests.stream.annotated import annotations_of


def test_the_box_of_one_pixel_is_its_point() -> None:
    masks = np.zeros((1, 30, 40), np.bool_)
    masks[0, 7, 11] = True
    for size in (16, 40, 100):
        sample = pick_masks(annotations_of(masks), SampleOptions(image_size=size), 0, 0)
        assert sample.points.tolist() == [pytest.approx([11.5 * size / 40, 7.5 * round(30 * size / 40) / 30])]
        assert sample.boxes.tolist() == [[*sample.points[0], *sample.points[0]]]
        corners, _ = clicks.box_prompts(torch.from_numpy(sample.boxes))
        point, _ = clicks.point_prompts(torch.from_numpy(sample.points))
        assert torch.equal(corners[:, 0], point[:, 0])
        assert torch.equal(corners[:, 1], point[:, 0])


def test_the_box_of_the_whole_image_ends_at_the_centres_of_its_corner_pixels() -> None:
    masks = np.ones((1, 30, 40), np.bool_)
    sample = pick_masks(annotations_of(masks), SampleOptions(image_size=40), 0, 0)
    assert sample.boxes.tolist() == [[0.5, 0.5, 39.5, 29.5]]
    half = pick_masks(annotations_of(masks), SampleOptions(image_size=20), 0, 0)
    assert half.boxes.tolist() == [[0.25, 0.25, 19.75, 14.75]]


@pytest.mark.skipif(find_spec("segment_anything") is None, reason="no segment_anything: the published code")
def test_box_prompts_are_those_of_the_published_code_at_the_images_own_size() -> None:
    masks = np.random.default_rng(0).random((6, 64, 50)) < 0.002
    masks[0], masks[1] = False, True
    masks[0, 63, 49] = True
    sample = pick_masks(annotations_of(masks), SampleOptions(image_size=64), 0, 0)
    corners, _ = clicks.box_prompts(torch.from_numpy(sample.boxes))
    theirs = published.module("segment_anything.utils.amg").batched_mask_to_box(torch.from_numpy(masks))
    assert torch.equal(corners.reshape(-1, 4), theirs.float())
