"""The losses of SAM ("Segment Anything", 2023, appendix A), one number for each predicted mask.

All losses are computed in float32, for logits of any dtype and under autocast too. As in the published code,
they cover the complete padded square: pixels outside the image are background that the model has to learn.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def focal_loss(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Sigmoid focal loss (Lin et al., "Focal loss for dense object detection", 2017), mean over the pixels.

    Logits of any float type and targets of any type, 1 for foreground, that broadcast: [..., H, W] -> float32
    [...]. `alpha` is the weight of foreground pixels; background pixels have 1 - alpha.
    """
    foreground = targets.float()
    # The logit of the wrong class; its sigmoid is the predicted probability of that class.
    wrong = logits.float() * (1 - 2 * foreground)
    weights = (2 * alpha - 1) * foreground + (1 - alpha)
    return (weights * torch.sigmoid(wrong) ** gamma * functional.softplus(wrong)).mean(dim=(-2, -1))


def dice_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """1 - (2 * overlap + 1) / (predicted + true + 1), in sums of probabilities over the pixels.

    Milletari et al., "V-Net", 2016, with plain sums; adding 1 keeps the loss of an empty mask finite.
    Arguments and result as for `focal_loss`.
    """
    probabilities = torch.sigmoid(logits.float())
    foreground = targets.float()
    overlap = (probabilities * foreground).sum(dim=(-2, -1))
    total = probabilities.sum(dim=(-2, -1)) + foreground.sum(dim=(-2, -1))
    return 1 - (2 * overlap + 1) / (total + 1)


def iou_loss(predicted: Tensor, actual: Tensor, error: Literal["squared", "absolute"] = "squared") -> Tensor:
    """Error of a predicted IoU, float32 of the arguments' shape; no gradient goes to `actual`."""
    difference = predicted.float() - actual.float().detach()
    return difference**2 if error == "squared" else difference.abs()


def overlaps(masks: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels of the intersection and the union: two int64 [...] for bool [..., H, W] that broadcast."""
    intersections = _pixels(masks & targets)
    return intersections, _pixels(masks) + _pixels(targets) - intersections


def iou(intersections: Tensor, unions: Tensor) -> Tensor:
    """float32 IoU of pixel counts; 0 if the union has no pixel, as in the published code."""
    return intersections.float() / unions.clamp(min=1).float()


def _pixels(masks: Tensor) -> Tensor:
    """Number of True pixels: int64 [...] for [..., H, W]."""
    return masks.sum(dim=-1, dtype=torch.int32).sum(dim=-1)  # faster on the CPU than a sum in int64
