"""Compiled iterations: the same losses and gradients, and two graphs for any numbers of masks and clicks."""

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


def step(interactive, counts, autocast=None):
    """The sums of a micro-batch, and the gradients of all parameters."""
    interactive.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        sums = interactive(*micro_batch(counts))
    sums["loss"].backward()
    return {name: value.detach() for name, value in sums.items()}, [
        parameter.grad.clone() for parameter in interactive.parameters()
    ]


def pair(recipe, **sizes):
    """A model with and without compiled iterations, with equal weights."""
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
        padded = with_equal_counts(targets)
        most = max(counts)
        assert padded.counts == (most, most)
        assert padded.image.tolist() == [0] * most + [1] * most
        own = [0 * most + mask for mask in range(counts[0])] + [most + mask for mask in range(counts[1])]
        for name in ("masks", "boxes", "points", "keys", "weights"):
            assert torch.equal(getattr(padded, name)[own], getattr(targets, name)), name
        assert padded.weights.sum() == targets.weights.sum()


def test_losses_with_padding_equal_those_without_it():
    plain, padding = pair(Recipe(clicks=1, unprompted=1))
    padding.iteration.compile("eager")
    padding.iteration._compiled = padding.iteration._compare_equal  # the same code, uncompiled
    for counts in ((4, 3), (3, 0)):
        compare(step(padding, counts), step(plain, counts), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sizes", "autocast", "tolerance"),
    [
        (Recipe(), {}, None, 1e-5),
        (Recipe(), {"pixel_features": 8}, None, 1e-5),
        (Recipe(clicks=2, feedback_gradient=True), {}, None, 1e-5),
        (Recipe(clicks=2), {}, torch.bfloat16, 0.05),
    ],
)
def test_two_graphs_for_any_numbers_of_masks_and_clicks(recipe, sizes, autocast, tolerance):
    from torch._dynamo.testing import CompileCounterWithBackend  # triton: see tests/engine/compiling.py

    plain, compiled = pair(recipe, **sizes)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled.iteration.compile(graphs)
    for counts in COUNTS:
        compare(step(compiled, counts, autocast), step(plain, counts, autocast), tolerance)
        assert graphs.frame_count == 2, counts


@pytest.mark.slow
def test_the_compiler_of_the_command_gives_the_same_losses():
    recipe = Recipe(clicks=1, unprompted=1)
    (plain, _), compiled = pair(recipe), Interactive(Sam(replace(SMALL, compile_decoder=True)), recipe)
    compiled.load_state_dict(plain.state_dict())
    for counts in COUNTS[:3]:
        compare(step(compiled.eval(), counts), step(plain.eval(), counts), 1e-5)
