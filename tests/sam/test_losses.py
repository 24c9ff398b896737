"""The losses compared with the formulas in numpy."""

import numpy as np
import pytest
import torch

from sa1b.sam import targets as of_targets
from sa1b.sam.targets import at_size, compared, dice_loss, focal_loss, iou, overlaps
from tests.masks.test_raster_triton import python, with_triton


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 4 * torch.randn(5, 3, 8, 12)
    return logits.to(dtype), torch.rand(5, 1, 8, 12) < 0.3


def reference_focal(logits, targets, alpha, gamma):
    probability = 1 / (1 + np.exp(-logits.double().numpy()))
    truth = np.broadcast_to(targets.numpy(), probability.shape)
    of_truth = np.where(truth, probability, 1 - probability)
    return (np.where(truth, alpha, 1 - alpha) * (1 - of_truth) ** gamma * -np.log(of_truth)).mean((-2, -1))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.5, 0.0), (0.9, 3.0)])
def test_focal_loss_is_its_formula(alpha, gamma):
    logits, targets = case()
    found = focal_loss(logits, targets, alpha, gamma)
    assert found.shape == (5, 3)
    np.testing.assert_allclose(found, reference_focal(logits, targets, alpha, gamma), rtol=1e-5)


def test_focal_loss_has_the_published_alpha_and_gamma_by_default():
    logits, targets = case()
    np.testing.assert_allclose(
        focal_loss(logits, targets), reference_focal(logits, targets, 0.25, 2), rtol=1e-5
    )


def test_dice_loss_is_its_formula():
    logits, targets = case()
    probability = 1 / (1 + np.exp(-logits.double().numpy()))
    truth = targets.numpy().astype(float)
    overlap = (probability * truth).sum((-2, -1))
    expected = 1 - (2 * overlap + 1) / (probability.sum((-2, -1)) + truth.sum((-2, -1)) + 1)
    np.testing.assert_allclose(dice_loss(logits, targets), expected, rtol=1e-5)


def test_overlaps_count_pixels_of_both_and_of_either():
    torch.manual_seed(1)
    masks, targets = torch.rand(4, 3, 9, 7) < 0.5, torch.rand(4, 1, 9, 7) < 0.2
    intersections, unions = overlaps(masks, targets)
    assert (intersections.dtype, unions.dtype) == (torch.int64, torch.int64)
    one, other = masks.numpy(), np.broadcast_to(targets.numpy(), masks.shape)
    np.testing.assert_array_equal(intersections, (one & other).sum((-2, -1)))
    np.testing.assert_array_equal(unions, (one | other).sum((-2, -1)))
    np.testing.assert_allclose(
        iou(intersections, unions), (one & other).sum((-2, -1)) / (one | other).sum((-2, -1)), rtol=1e-6
    )


def test_the_iou_of_nothing_with_nothing_is_0():
    assert iou(torch.tensor([0]), torch.tensor([0])).tolist() == [0]


@pytest.mark.parametrize("loss", [focal_loss, dice_loss])
def test_losses_are_float32_for_half_precision_and_under_autocast(loss):
    logits, targets = case(torch.bfloat16)
    expected = loss(logits.float(), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("loss", [focal_loss, dice_loss])
def test_extreme_logits_and_empty_masks_stay_finite(loss):
    logits = torch.tensor([1e4, -1e4, 0.0, 30.0])[:, None, None].expand(4, 6, 6).clone().requires_grad_()
    for targets in (torch.zeros(4, 6, 6), torch.ones(4, 6, 6)):
        (gradient,) = torch.autograd.grad(loss(logits, targets).sum(), logits)
        assert torch.isfinite(loss(logits, targets)).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("loss", [focal_loss, dice_loss])
def test_no_mask_has_no_loss(loss):
    assert loss(torch.zeros(0, 3, 4, 4), torch.zeros(0, 1, 4, 4)).shape == (0, 3)


@pytest.mark.parametrize("loss", [focal_loss, dice_loss])
def test_gradients_are_those_of_finite_differences(loss):
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    (gradient,) = torch.autograd.grad(loss(logits, targets).sum(), logits)
    step = 1e-2
    for index in np.ndindex(2, 3, 4):
        moved = torch.zeros_like(logits)
        moved[index] = step
        slope = (loss(logits + moved, targets) - loss(logits - moved, targets)).sum().item() / (2 * step)
        assert slope == pytest.approx(gradient[index].item(), abs=2e-4)


@pytest.mark.parametrize("size", [8, 20])
def test_candidates_are_compared_by_the_losses_and_the_iou_of_their_masks_in_the_image(size):
    logits = case(torch.bfloat16)[0][..., :8]
    targets, inside = torch.rand(2, 5, size, size) < 0.4
    focal, dice, actual, masks = compared(logits, targets & inside, inside, 0.3, 1.5)
    large, expected = at_size(logits, inside)
    assert (large.shape, large.dtype) == ((5, 3, size, size), torch.float32)
    assert torch.equal(masks, expected)
    assert torch.equal(expected, (large > 0) & inside[:, None])
    truth = (targets & inside)[:, None]
    assert torch.equal(focal, focal_loss(large, truth, 0.3, 1.5))
    assert torch.equal(dice, dice_loss(large, truth))
    assert torch.equal(actual, iou(*overlaps(masks, truth)))


@with_triton
def test_the_interpreter_gives_the_losses_in_float64():
    assert python("-m", "tests.sam.loss_cases", TRITON_INTERPRET="1") == "6 kinds of losses\n"


@pytest.mark.gpu
def test_compiled_kernels_give_the_losses_in_float64():
    from tests.sam.loss_cases import check_all  # needs triton

    assert check_all("cuda") == 6


@pytest.mark.gpu
def test_candidates_on_a_gpu_are_compared_in_one_pass(monkeypatch):
    def refuse(*_):
        raise AssertionError("the plain form was used")

    logits = torch.randn(2, 3, 8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.rand(2, 8, 8, device="cuda") < 0.3
    expected = compared(logits.cpu(), targets.cpu(), targets.cpu(), 0.25, 2.0)
    monkeypatch.setattr(of_targets, "at_size", refuse)
    monkeypatch.setattr("sa1b.sam.image_tokens.IN_USE", {"losses"})
    found = compared(logits, targets, targets, 0.25, 2.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)
    (found[0] + found[1]).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
