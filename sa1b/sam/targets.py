"""The targets of a micro-batch for training and evaluation, and the losses of predictions.

The losses are those of SAM ("Segment Anything", 2023, appendix A), one number for each predicted mask. They
are computed in float32, for logits of any dtype and under autocast too. As in the published code, they cover
the complete padded square: pixels outside the image are background that the model has to learn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sa1b.hashing import Purpose
from sa1b.sam.clicks import random_words
from sa1b.sam.image_tokens import kernels_of


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The targets of the M masks of a micro-batch of B images. Boxes and points are in the padded square."""

    masks: Tensor  # uint8 [M, R, R], 1: foreground; the padded square, R at least image_size / 4
    boxes: Tensor  # float32 [M, 4], x0, y0, x1, y1: centres of first and last column and row
    points: Tensor  # float32 [M, 2], x and y of the centre of a foreground pixel
    image: Tensor  # int64 [M], index in the micro-batch of each mask's image
    weights: Tensor  # float32 [M]; 0 for padding, and for masks without a pixel at R
    keys: Tensor  # int64 [M], a hash for each mask, from which its random values are computed
    sizes: Tensor  # int64 [B, 2], rows and columns of each image in the padded square
    # masks of each image, on the host, for ascending `image`: they share products with its embedding. None:
    # each mask gets a copy of the embedding
    counts: Sequence[int] | None = None


def inputs_of(batch: Any, seed: int) -> tuple[Tensor, Targets, Tensor]:
    """The arguments of `Interactive.forward` from a `sa1b.Batch` with dense masks.

    A mask counts if its image is valid and it has a pixel at the size of the dense masks.
    """
    assert batch.dense is not None, "the loader was not asked for dense masks"
    image, positions = batch.masks.image, batch.positions
    key = torch.full((), seed, dtype=torch.int64, device=positions.device)
    targets = Targets(
        masks=batch.dense,
        boxes=batch.boxes,
        points=batch.points,
        image=image,
        weights=(batch.valid[image] & batch.dense.flatten(1).any(dim=1)).float(),
        # The index is used, not the id, because all masks without an id have the id -1.
        keys=random_words(key, int(Purpose.PROMPT), positions[image], batch.mask_index),
        sizes=batch.framed_sizes,
        counts=batch.masks.counts,
    )
    return batch.images, targets, random_words(key, int(Purpose.VISIT), positions)


def rounded_up(count: int) -> int:
    """The smallest number of the form n or n * 2 ** k, n from 4 to 7, that is not below `count`."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step


def with_equal_counts(targets: Targets, most: int) -> Targets:
    """Targets with `most` masks for each image; M must be positive. The host does not wait for the device.

    An image is padded with copies of its last mask with the weight 0, an image without masks with copies of a
    mask of another image.
    """
    assert targets.counts is not None
    images = len(targets.counts)
    if min(targets.counts) == most:
        return targets
    numbers = torch.arange(images, device=targets.image.device)
    begins = torch.searchsorted(targets.image, numbers)
    ends = torch.searchsorted(targets.image, numbers, right=True)
    chosen = begins[:, None] + torch.arange(most, device=targets.image.device)
    present = (chosen < ends[:, None]).flatten()
    source = torch.minimum(chosen, ends[:, None] - 1).clamp(min=0).flatten()
    names = ("masks", "boxes", "points", "keys", "weights")
    padded: dict[str, Any] = {name: getattr(targets, name)[source] for name in names}
    padded["weights"] = padded["weights"] * present
    padded["image"] = numbers[:, None].expand(-1, most).flatten()
    return replace(targets, **padded, counts=(most,) * images)


def by_image(of_masks: Tensor, targets: Targets) -> Tensor:
    """Sums over the masks of each image, in the same order each time: float32 [B, n] from [n, M]."""
    images = torch.arange(len(targets.sizes), device=of_masks.device)
    belongs = targets.image == images[:, None]
    return torch.where(belongs[:, None], of_masks, 0).sum(dim=2)


def at_size(logits: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [M, K, H, W] at the size R of `inside`, float32, and their masks, without pixels outside."""
    large, size = logits.float(), inside.shape[-1]
    if size > logits.shape[-1]:
        large = functional.interpolate(large, (size, size), mode="bilinear", align_corners=False)
    return large, (large.detach() > 0) & inside[:, None]


def compared(
    logits: Tensor, targets: Tensor, inside: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Candidates compared with their targets: focal loss, dice loss and IoU, float32 [M, K], and the masks.

    Logits float [M, K, H, W], targets and pixels of the image bool [M, R, R]; see `at_size`, `focal_loss`.
    """
    # On a CUDA device in one pass, except in a compiled graph, where torch fuses the operators.
    kernels = kernels_of("losses", logits) if logits.shape[2:] == targets.shape[1:] else None
    if kernels is not None and logits.dtype in kernels.FORMATS:
        inputs = (logits.contiguous(), targets.contiguous(), inside.contiguous())
        focal, dice, actual, masks = kernels.Comparison.apply(*inputs, alpha, gamma)
        return focal, dice, actual, masks
    (large, masks), truth = at_size(logits, inside), targets[:, None]
    focal, dice = focal_loss(large, truth, alpha, gamma), dice_loss(large, truth)
    return focal, dice, iou(*overlaps(masks, truth)), masks


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


def overlaps(masks: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels of the intersection and the union: two int64 [...] for bool [..., H, W] that broadcast."""
    intersections = _pixels(masks & targets)
    return intersections, _pixels(masks) + _pixels(targets) - intersections


def iou(intersections: Tensor, unions: Tensor) -> Tensor:
    """float32 IoU of pixel counts; 0 if the union has no pixel, as in the published code."""
    return intersections.float() / unions.clamp(min=1).float()


def _pixels(masks: Tensor) -> Tensor:
    return masks.sum(dim=-1, dtype=torch.int32).sum(dim=-1)  # faster on the CPU than a sum in int64
