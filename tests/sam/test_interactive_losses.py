"""The losses of a micro-batch, for a substitute model and for a small Sam."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from sa1b.masks.raster_torch import inside_image
from sa1b.sam.clicks import TOP_LEFT
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from tests.sam.sketch import PLAIN, SIZE, SMALL, case, trained

TOKEN_TO_IMAGE = ("layers.0.cross_attn_", "layers.1.cross_attn_", "final_attn_")

pytestmark = pytest.mark.usefixtures("one_thread")


def reference_parts(logits, truth, predicted, inside, recipe):
    """Focal loss, dice loss, squared error of the IoU, and the IoU, of one predicted mask."""
    probability = 1 / (1 + np.exp(-logits))
    of_other = np.where(truth, 1 - probability, probability)
    surprise = np.logaddexp(0, np.where(truth, -logits, logits))  # -log of the probability of the truth
    weight = np.where(truth, recipe.focal_alpha, 1 - recipe.focal_alpha)
    focal = (weight * of_other**recipe.focal_gamma * surprise).mean()
    dice = 1 - (2 * (probability * truth).sum() + 1) / (probability.sum() + truth.sum() + 1)
    mask = (logits > 0) & inside
    iou = (mask & truth).sum() / max((mask | truth).sum(), 1)
    return focal, dice, (predicted - iou) ** 2, iou


def reference_sums(sketch, targets, recipe):
    """The sums of a training step, from the recorded predictions, mask by mask."""
    totals = np.zeros(5)  # focal, dice, IoU loss, first and last IoU
    inside = inside_image(targets.sizes[targets.image], SIZE, targets.masks.shape[1]).numpy()
    for mask, weight in enumerate(targets.weights.tolist()):
        of_iterations, ious = [], []
        for number, call in enumerate(sketch.decodes):
            kinds = (1, 2, 3) if number == 0 else (0,)
            parts = [
                reference_parts(
                    call.logits[mask, kind].detach().double().numpy(),
                    targets.masks[mask].numpy() == 1,
                    call.iou[mask, kind].item(),
                    inside[mask],
                    recipe,
                )
                for kind in kinds
            ]
            best = min(parts, key=lambda one: recipe.focal_weight * one[0] + recipe.dice_weight * one[1])
            quality = best[2] if recipe.iou_masks == "best" else np.mean([one[2] for one in parts])
            share, every = recipe.all_masks_share, np.mean(parts, axis=0)
            of_iterations.append(
                (*((1 - share) * best[part] + share * every[part] for part in (0, 1)), quality)
            )
            ious.append(parts[int(np.argmax([call.iou[mask, kind].item() for kind in kinds]))][3])
        combined = (
            np.mean(of_iterations, axis=0)
            if recipe.iteration_loss == "mean"
            else np.sum(of_iterations, axis=0)
        )
        totals += weight * np.array([*combined, ious[0], ious[-1]])
    return totals


@pytest.mark.parametrize("iteration_loss", ["mean", "sum"])
@pytest.mark.parametrize(("iou_masks", "all_masks_share"), [("best", 0.0), ("all", 0.0), ("all", 0.25)])
def test_the_sums_are_those_of_the_masks_taken_one_by_one(iteration_loss, iou_masks, all_masks_share):
    recipe = replace(
        PLAIN,
        iteration_loss=iteration_loss,
        iou_masks=iou_masks,
        all_masks_share=all_masks_share,
        focal_weight=7.0,
        dice_weight=2.0,
        iou_weight=3.0,
    )
    images, targets, keys = case()
    targets = replace(targets, weights=torch.tensor([1.0, 0.0, 0.5, 2.0] * 3))
    sketch, found = trained(recipe, (images, targets, keys))
    expected = reference_sums(sketch, targets, recipe)
    names = ("focal", "dice", "iou_loss", "iou_first", "iou_last")
    np.testing.assert_allclose([found[name].item() for name in names], expected, rtol=2e-5)
    assert found["loss"].item() == pytest.approx(expected[:3] @ [7, 2, 3], rel=2e-5)
    assert found["count"].item() == 10.5
    assert all(not found[name].requires_grad for name in (*names, "count"))


def test_of_the_first_three_masks_the_best_is_trained_and_later_mask_0_alone():
    sketch, found = trained(PLAIN)
    found["loss"].backward()
    moved = [call.logits.grad.abs().sum(dim=(2, 3)) > 0 for call in sketch.decodes]
    predictions = [call.iou.grad != 0 for call in sketch.decodes]
    assert (moved[0].sum(dim=1) == 1).all()
    assert not moved[0][:, 0].any()
    assert moved[0].any(dim=0).sum() > 1  # not the same mask for all
    assert torch.equal(predictions[0], moved[0])
    for later in (*moved[1:], *predictions[1:]):
        assert later[:, 0].all()
        assert not later[:, 1:].any()


def test_all_three_predicted_ious_are_trained_where_the_recipe_says_so():
    sketch, found = trained(replace(PLAIN, iou_masks="all"))
    found["loss"].backward()
    assert (sketch.decodes[0].iou.grad[:, 1:] != 0).all()


def test_all_three_masks_are_trained_by_the_share_that_the_recipe_gives_them():
    sketch, found = trained(replace(PLAIN, all_masks_share=0.5))
    found["loss"].backward()
    moved = sketch.decodes[0].logits.grad.abs().sum(dim=(2, 3)) > 0
    assert moved[:, 1:].all()
    assert not moved[:, 0].any()


def test_larger_targets_are_met_by_larger_logits():
    recipe = replace(PLAIN, clicks=0, unprompted=1)
    images, targets, keys = case(size=40)
    sketch, found = trained(recipe, (images, targets, keys))
    for call in sketch.decodes:
        call.logits = functional.interpolate(call.logits, (40, 40), mode="bilinear", align_corners=False)
    expected = reference_sums(sketch, targets, recipe)
    np.testing.assert_allclose([found["focal"].item(), found["dice"].item()], expected[:2], rtol=2e-5)
    assert sketch.decodes[1].low_res.shape == (12, 1, 16, 16)


def step(model: Sam, recipe: Recipe, independent: bool | None = None, autocast=None):
    """The loss of a micro-batch and the gradients of all parameters."""
    interactive = Interactive(model, recipe)
    if independent is not None:
        interactive._iterations_are_independent = lambda device: independent
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        found = interactive(*case())
    (3 * found["loss"]).backward()
    return [found["loss"].detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_early_backward_pass_leaves_the_gradients_of_a_late_one(autocast):
    torch.manual_seed(0)
    model = Sam(SMALL)
    early, late = (step(model, Recipe(), independent, autocast) for independent in (True, False))
    largest = max(gradient.abs().max() for gradient in late[1:])
    for one, other in zip(early, late, strict=True):
        # The gradients of the biases of keys are zero except for rounding errors. Under autocast, a late
        # backward pass adds the gradients of the iterations in bfloat16.
        scale = float(other.abs().max() + 0.02 * largest)
        torch.testing.assert_close(one, other, rtol=0, atol=(0.05 if autocast else 2e-6) * scale)


def test_an_early_backward_pass_keeps_the_activations_of_one_iteration():
    torch.manual_seed(0)
    model, peaks = Sam(SMALL), {}

    class Saved:
        numbers = peak = 0

        def __init__(self, tensor):
            self.tensor = tensor
            Saved.numbers += tensor.numel()
            Saved.peak = max(Saved.peak, Saved.numbers)

        def __del__(self):
            Saved.numbers -= self.tensor.numel()

    for clicked in (0, 8):
        Saved.numbers = Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            found = Interactive(model, Recipe(clicks=clicked, unprompted=0))(*case())
        peaks[clicked] = Saved.peak
        found["loss"].backward()
    assert peaks[8] < 1.5 * peaks[0]


def test_float16_and_gradients_through_the_feedback_put_the_backward_pass_last():
    model = Sam(SMALL)
    device = torch.device("cpu")
    assert Interactive(model, Recipe())._iterations_are_independent(device)
    assert not Interactive(model, Recipe(feedback_gradient=True))._iterations_are_independent(device)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not Interactive(model, Recipe())._iterations_are_independent(device)
    with torch.no_grad():
        assert not Interactive(model, Recipe())._iterations_are_independent(device)


def test_gradients_go_through_the_feedback_where_the_recipe_says_so():
    torch.manual_seed(0)
    model = Sam(SMALL)
    apart, through = (step(model, Recipe(feedback_gradient=switch)) for switch in (False, True))
    torch.testing.assert_close(apart[0], through[0])
    assert not all(torch.allclose(*pair) for pair in zip(apart, through, strict=True))
    # The mean over iterations; only the last iteration is trained by its own loss:
    sketch, found = trained(replace(PLAIN, feedback_gradient=True))
    assert all(call.low_res.requires_grad for call in sketch.decodes[1:])
    found["loss"].backward()
    assert all(call.logits.grad[:, 1:].any() for call in sketch.decodes[:1])


def test_losses_are_float32_and_finite_under_autocast():
    torch.manual_seed(0)
    model = Sam(SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Interactive(model, Recipe())(*case())
    found["loss"].backward()
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize(("masks", "images"), [(4, 2), (0, 2), (0, 0)])
def test_all_parameters_get_gradients_of_zeros_where_nothing_counts(masks, images):
    torch.manual_seed(0)
    model = Sam(SMALL)
    pixels, targets, keys = case(masks, images)
    found = Interactive(model, Recipe())(pixels, replace(targets, weights=torch.zeros(masks)), keys)
    found["loss"].backward()
    assert not any(value.any() for value in found.values())
    assert found["of_images"].shape == (images, 3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_all_parameters_are_trained_where_masks_count():
    torch.manual_seed(0)
    model = Sam(replace(SMALL, drop_path=0.0))
    Interactive(model, Recipe())(*case())["loss"].backward()
    untrained = {name for name, parameter in model.named_parameters() if not parameter.grad.any()}
    # A candidate of the first iteration that is never the best one is not trained.
    ambiguous = [f"mask_decoder.output_hypernetworks_mlps.{kind}." for kind in (1, 2, 3)]
    idle = [prefix for prefix in ambiguous if any(name.startswith(prefix) for name in untrained)]
    assert len(idle) < 3
    # The bias of the keys adds a constant to all logits of a softmax, so its gradient is zero.
    image_keys = {f"mask_decoder.transformer.{name}token_to_image.k_proj.bias" for name in TOKEN_TO_IMAGE}
    rest = [name for name in untrained - image_keys if not name.startswith(tuple(idle) or ("none",))]
    assert rest == []


def test_a_model_learns_the_masks_it_is_shown():
    torch.manual_seed(0)
    recipe = Recipe(clicks=1, unprompted=1)
    interactive = Interactive(Sam(replace(SMALL, drop_path=0.0)), recipe)
    optimizer = torch.optim.AdamW(interactive.parameters(), 4e-3)
    found = []
    for _ in range(60):
        sums = interactive(*case(3))
        optimizer.zero_grad()
        (sums["loss"] / 3).backward()
        optimizer.step()
        found.append((sums["loss"].item() / 3, sums["iou_last"].item() / 3))
    assert found[0][1] < 0.3
    assert found[-1][0] < 0.2 * found[0][0]
    assert found[-1][1] > 0.8


@pytest.mark.parametrize(("box_masks", "used"), [("three", {0, 1, 2, 3}), ("one", {0})])
def test_a_box_gets_three_masks_or_one(box_masks: str, used: set[int]) -> None:
    recipe = replace(PLAIN, box_masks=box_masks, iou_masks="all", box_probability=1.0)
    sketch, sums = trained(recipe)
    sums["loss"].backward()
    assert set(torch.nonzero(sketch.radius.grad).flatten().tolist()) == used


def test_points_get_three_masks_beside_boxes_with_one() -> None:
    recipe = replace(PLAIN, box_masks="one", iou_masks="all", clicks=0, unprompted=0)
    sketch, sums = trained(recipe, case(40))
    sums["loss"].backward()
    trained_masks = sketch.decodes[0].iou.grad != 0
    boxed = sketch.decodes[0].labels[:, 0] == TOP_LEFT
    assert 0 < int(boxed.sum()) < 40
    assert torch.equal(trained_masks, torch.where(boxed[:, None], torch.arange(4) == 0, torch.arange(4) > 0))
