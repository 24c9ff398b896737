"""The losses compared with the formulas in numpy."""

import numpy as np
import pytest
import torch

from sa1b.sam.targets import dice_loss, focal_loss, iou, iou_loss, overlaps


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


def test_iou_loss_is_the_squared_error_and_trains_the_prediction_alone():
    predicted = torch.tensor([0.5, 1.25], requires_grad=True)
    actual = torch.tensor([0.75, 1.0], requires_grad=True)
    found = iou_loss(predicted, actual)
    assert found.tolist() == [0.0625, 0.0625]
    found.sum().backward()
    assert predicted.grad.tolist() == [-0.5, 0.5]
    assert actual.grad is None


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


def test_the_error_of_a_predicted_iou_is_squared_or_absolute():
    predicted, actual = torch.tensor([0.5, 0.25], requires_grad=True), torch.tensor([0.75, 0.25])
    assert iou_loss(predicted, actual).tolist() == [0.0625, 0]
    found = iou_loss(predicted, actual, "absolute")
    assert found.tolist() == [0.25, 0]
    found.sum().backward()
    assert predicted.grad.tolist() == [-1, 0]
