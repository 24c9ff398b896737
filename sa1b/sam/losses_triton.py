"""Predicted masks compared with their targets on a CUDA device in one pass over the pixels: Triton kernels.

torch computes the losses of `sa1b.sam.targets` in 41 passes, most over float32 numbers. Here the forward
pass reads logits, targets and pixels of the image once and writes the masks. The backward pass reads logits
and targets and writes the gradient. The arithmetic is float32. A program sums over a part of the pixels of a
candidate; a second kernel adds the parts in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("losses on a CUDA device need triton: pip install 'sa1b[kernels]'") from error

FORMATS = (torch.bfloat16, torch.float16, torch.float32)  # of logits
# A thread has 16 pixels of a part, and needs at most 94 registers forward and 46 backward (sm_90).
PART, WARPS = 2048, 4
SUMS = 6  # of a part: focal loss, overlap, probabilities, and pixels of target, mask and intersection


@triton.jit
def terms(
    x: tl.tensor, true: tl.tensor, alpha: tl.constexpr, gamma: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Of the logit of the wrong class: softplus, sigmoid, and the factor of softplus in the focal loss.

    Also e = exp(-|x|) and r = 1 / (1 + e): the sigmoid of |x| is r, that of -|x| is e * r.
    """
    wrong = tl.where(true, -x, x)
    e = tl.exp2(-1.4426950408889634 * tl.abs(x))
    above = 1 + e
    r = 1 / above
    # log(1 + e) with the rounding error of the sum added
    softplus = tl.maximum(wrong, 0.0) + tl.log(above) + (e - (above - 1)) * r
    sigmoid = tl.where(wrong > 0, r, e * r)
    factor = tl.where(true, alpha, 1 - alpha)
    if gamma == 2:
        factor = factor * (sigmoid * sigmoid)
    elif gamma != 0:
        factor = factor * tl.exp(gamma * (wrong - softplus))
    return softplus, sigmoid, factor, e, r


@triton.jit
def compare(
    logits: tl.tensor, targets: tl.tensor, inside: tl.tensor, masks: tl.tensor, sums: tl.tensor,
    alpha: tl.constexpr, gamma: tl.constexpr, CANDIDATES: tl.constexpr, PIXELS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Write the masks and the sums of a part of the pixels of a candidate."""
    candidate = (tl.program_id(0) // PARTS).to(tl.int64)
    pixel = (tl.program_id(0) % PARTS) * PART + tl.arange(0, PART)
    exists = pixel < PIXELS
    here, there = candidate * PIXELS, candidate // CANDIDATES * PIXELS
    x = tl.load(logits + here + pixel, mask=exists, other=0).to(tl.float32)
    true = tl.load(targets + there + pixel, mask=exists, other=0) != 0
    mask = (x > 0) & (tl.load(inside + there + pixel, mask=exists, other=0) != 0)
    tl.store(masks + here + pixel, mask.to(tl.uint8), mask=exists)
    softplus, _, factor, e, r = terms(x, true, alpha, gamma)
    probability = tl.where(exists, tl.where(x > 0, r, e * r), 0.0)
    sums += tl.program_id(0).to(tl.int64) * 6
    tl.store(sums, tl.sum(tl.where(exists, factor * softplus, 0.0)))
    tl.store(sums + 1, tl.sum(tl.where(true, probability, 0.0)))
    tl.store(sums + 2, tl.sum(probability))
    tl.store(sums + 3, tl.sum(true.to(tl.float32)))
    tl.store(sums + 4, tl.sum(mask.to(tl.float32)))
    tl.store(sums + 5, tl.sum((mask & true).to(tl.float32)))


@triton.jit
def finish(
    sums: tl.tensor, focal: tl.tensor, dice: tl.tensor, iou: tl.tensor, totals: tl.tensor,
    PIXELS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the losses and the IoU of a candidate; totals are the two sums of the dice loss."""
    candidate = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    sums += (candidate * PARTS + part) * 6
    tl.store(focal + candidate, tl.sum(tl.load(sums, mask=part < PARTS, other=0)) / PIXELS)
    overlap = tl.sum(tl.load(sums + 1, mask=part < PARTS, other=0))
    # Numbers of pixels are added as integers, because float32 is exact only up to 2 ** 24.
    of_target = tl.sum(tl.load(sums + 3, mask=part < PARTS, other=0).to(tl.int32))
    of_mask = tl.sum(tl.load(sums + 4, mask=part < PARTS, other=0).to(tl.int32))
    common = tl.sum(tl.load(sums + 5, mask=part < PARTS, other=0).to(tl.int32))
    total = tl.sum(tl.load(sums + 2, mask=part < PARTS, other=0)) + of_target.to(tl.float32)
    tl.store(totals + 2 * candidate, overlap)
    tl.store(totals + 2 * candidate + 1, total)
    tl.store(dice + candidate, 1 - tl.div_rn(2 * overlap + 1, total + 1))
    union = tl.maximum(of_target + of_mask - common, 1)
    tl.store(iou + candidate, tl.div_rn(common.to(tl.float32), union.to(tl.float32)))


@triton.jit
def gradient(
    logits: tl.tensor, targets: tl.tensor, totals: tl.tensor, of_focal: tl.tensor, of_dice: tl.tensor,
    out: tl.tensor, alpha: tl.constexpr, gamma: tl.constexpr, CANDIDATES: tl.constexpr, PIXELS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of both losses for a part of the pixels of a candidate."""
    candidate = (tl.program_id(0) // PARTS).to(tl.int64)
    pixel = (tl.program_id(0) % PARTS) * PART + tl.arange(0, PART)
    here, there = candidate * PIXELS, candidate // CANDIDATES * PIXELS
    x = tl.load(logits + here + pixel, mask=pixel < PIXELS, other=0).to(tl.float32)
    true = tl.load(targets + there + pixel, mask=pixel < PIXELS, other=0) != 0
    softplus, sigmoid, factor, e, r = terms(x, true, alpha, gamma)
    right = tl.where(tl.where(true, -x, x) > 0, e * r, r)  # 1 - sigmoid
    slope = factor * (gamma * right * softplus + sigmoid) * (tl.load(of_focal + candidate) / PIXELS)
    total = tl.load(totals + 2 * candidate + 1) + 1
    share = (2 * tl.load(totals + 2 * candidate) + 1) / total
    slope_of_dice = tl.where(true, share - 2, share) * (tl.load(of_dice + candidate) / total)
    slope = tl.where(true, -slope, slope) + slope_of_dice * (e * r * r)
    tl.store(out + here + pixel, slope.to(out.dtype.element_ty), mask=pixel < PIXELS)


class Comparison(torch.autograd.Function):
    """Focal loss, dice loss and IoU float32 [M, K], and masks bool [M, K, H, W]; see `targets.compared`.

    Contiguous logits of `FORMATS` [M, K, H, W], targets and pixels of the image bool [M, H, W].
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, inside: Tensor, alpha: float, gamma: float
    ) -> tuple[Tensor, ...]:
        count, sizes = logits.shape[:2].numel(), _sizes(logits)
        pixels, parts = sizes[1:]
        masks = torch.empty_like(logits, dtype=torch.bool)
        focal, dice, iou = (logits.new_empty(logits.shape[:2], dtype=torch.float32) for _ in range(3))
        totals = logits.new_empty((count, 2), dtype=torch.float32)
        sums = logits.new_empty((count, parts, SUMS), dtype=torch.float32)
        ctx.alpha, ctx.gamma = float(alpha), float(gamma)
        if count:
            grids = (targets.view(torch.uint8), inside.view(torch.uint8), masks.view(torch.uint8))
            compare[(count * parts,)](
                logits, *grids, sums, ctx.alpha, ctx.gamma, *sizes, PART, num_warps=WARPS
            )
            block = triton.next_power_of_2(parts)
            finish[(count,)](sums, focal, dice, iou, totals, pixels, parts, block, num_warps=1)
        ctx.save_for_backward(logits, targets, totals)
        ctx.mark_non_differentiable(iou, masks)
        return focal, dice, iou, masks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_focal: Tensor, of_dice: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, totals = ctx.saved_tensors
        out, sizes = torch.empty_like(logits), _sizes(logits)
        if len(totals):
            gradient[(len(totals) * sizes[2],)](
                logits, targets.view(torch.uint8), totals, of_focal.contiguous(), of_dice.contiguous(), out,
                ctx.alpha, ctx.gamma, *sizes, PART, num_warps=WARPS,
            )  # fmt: skip
        return out, None, None, None, None


def _sizes(logits: Tensor) -> tuple[int, int, int]:
    """Candidates of a mask, pixels of a candidate, and parts of them."""
    pixels = logits.shape[2:].numel()
    return logits.shape[1], pixels, triton.cdiv(pixels, PART)
