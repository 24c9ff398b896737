"""Images padded to equal numbers of masks: the same losses and gradients."""

from dataclasses import replace

import pytest
import torch

from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import with_equal_counts
from tests.sam.sketch import SMALL, case, part

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTS = ((4, 4), (4, 3), (2, 4), (3, 0), (1, 5), (1, 1), (0, 0), (6, 6), (5, 2), (7, 3))


def micro_batch(counts):
    """The first masks of each image."""
    pixels, targets, keys = case(14, 2)
    chosen = torch.tensor([*range(counts[0]), *range(7, 7 + counts[1])], dtype=torch.int64)
    return pixels, replace(part(targets, chosen), counts=counts), keys


def step(interactive, inputs):
    """The sums of a micro-batch, and the gradients of all parameters."""
    interactive.zero_grad()
    sums = interactive(*inputs)
    sums["loss"].backward()
    return {name: value.detach() for name, value in sums.items()}, [
        parameter.grad.clone() for parameter in interactive.parameters()
    ]


def pair(recipe, **sizes):
    """Two models with equal weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Interactive(Sam(replace(SMALL, drop_path=0.0, **sizes)), recipe))
    return models


def compare(one, other, tolerance):
    (sums, gradients), (expected, known) = one, other
    torch.testing.assert_close(sums, expected, rtol=tolerance, atol=tolerance)
    largest = max(gradient.abs().max() for gradient in known)
    for gradient, wanted in zip(gradients, known, strict=True):
        # The gradients of the biases of keys are zero except for rounding errors.
        scale = float(wanted.abs().max() + 0.02 * largest)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=tolerance * scale)


def test_padding_to_equal_numbers_of_masks_keeps_the_masks_and_weighs_nothing():
    for counts in COUNTS:
        _, targets, _ = micro_batch(counts)
        if max(counts) == 0:
            continue
        most = max(counts)
        padded = with_equal_counts(targets, most)
        assert padded.counts == (most, most)
        assert padded.image.tolist() == [0] * most + [1] * most
        own = [0 * most + mask for mask in range(counts[0])] + [most + mask for mask in range(counts[1])]
        for name in ("masks", "boxes", "points", "keys", "weights"):
            assert torch.equal(getattr(padded, name)[own], getattr(targets, name)), name
        assert padded.weights.sum() == targets.weights.sum()


def test_losses_with_padding_equal_those_without_it():
    plain, padding = pair(Recipe(clicks=1, unprompted=1))
    for counts in ((4, 3), (3, 0)):
        pixels, targets, keys = micro_batch(counts)
        padded = pixels, with_equal_counts(targets, max(counts)), keys
        compare(step(padding, padded), step(plain, (pixels, targets, keys)), 2e-6)
