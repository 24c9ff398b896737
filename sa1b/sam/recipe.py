"""The prompts, iterations and losses of a training step, and its floating-point operations.

Operations are computed from the sizes of the model, 2 per multiply-add.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sa1b.arguments import Range, check_fields
from sa1b.sam.image_encoder import Backbone
from sa1b.sam.mask_decoder import HEAD_LENGTH, MASKS
from sa1b.sam.model import ModelConfig
from sa1b.sam.similarity import CONTEXT, HIDDEN


@dataclass(frozen=True, slots=True)
class Recipe:
    """Prompts, iterations and losses of "Segment Anything" (Kirillov et al. 2023, appendix A) by default.

    A mask is decoded 1 + clicks + unprompted times: once with the first prompt, then with clicks on errors of
    the last prediction. In unprompted iterations the last prediction is the only new input.

    Attributes:
        box_probability: Probability that a mask's first prompt is its box, not a point. Paper: 0.5.
        box_noise: Standard deviation of the noise on each side of a box, as a fraction of its width or
            height; for uniform noise its largest value. Paper: 0.1.
        box_noise_kind: Distribution of the noise: normal (paper) or uniform (SAM 2's published code).
        box_masks: Masks that the model predicts if the first prompt is a box: three, as for a point, or one,
            as for several points (SAM 2's published code).
        box_noise_limit: Largest movement of a side, pixels of a 1024 square; scales with the image size.
            Paper: 20.
        clicks: Corrective clicks after the first prompt. Paper: 8.
        unprompted: Iterations without a new prompt. One is the last iteration, the others are at random
            positions among the clicks. Paper: 2.
        focal_weight: Weight of the focal loss. Paper: 20, with a weight of 1 for dice.
        dice_weight: Weight of the dice loss. Paper: 1.
        iou_weight: Weight of the error of the predicted IoU. Paper: 1.
        iou_loss: The error of a predicted IoU. Paper: squared. SAM 2: absolute.
        focal_alpha: Weight of foreground pixels in the focal loss; background pixels have 1 - alpha. The
            paper cites Lin et al. 2017: 0.25.
        focal_gamma: Exponent of the focal loss. Lin et al. 2017: 2.
        iou_masks: Masks of the first iteration whose predicted IoU is trained: best, the one with the lowest
            loss (paper), or all three (SAM 2, Ravi et al. 2024, appendix).
        all_masks_share: Weight of the mean over all three masks in the mask loss of the first iteration; the
            rest is the loss of the best mask. Paper: 0. Larger values make the masks similar, so that
            choosing the wrong one costs less (Rupprecht et al., "Learning in an Uncertain World", 2017).
        iteration_loss: Whether the losses of a mask's iterations are averaged (mean) or summed (sum). The
            paper does not specify this. The mean has the same scale for any number of iterations; SAM 2's
            published code uses the sum.
        feedback_gradient: Propagate the loss of an iteration to earlier predictions through their logits. The
            paper does not specify this; SAM 2's published code does it. The decoder takes a third more time,
            because activations are recomputed in the backward pass.
    """

    box_probability: Annotated[float, Range(0, 1)] = 0.5
    box_noise: Annotated[float, Range(0)] = 0.1
    box_noise_kind: Literal["normal", "uniform"] = "normal"
    box_masks: Literal["three", "one"] = "three"
    box_noise_limit: Annotated[float, Range(0)] = 20.0
    clicks: Annotated[int, Range(0)] = 8
    unprompted: Annotated[int, Range(0)] = 2
    focal_weight: Annotated[float, Range(0)] = 20.0
    dice_weight: Annotated[float, Range(0)] = 1.0
    iou_weight: Annotated[float, Range(0)] = 1.0
    iou_loss: Literal["squared", "absolute"] = "squared"
    focal_alpha: Annotated[float, Range(0, 1)] = 0.25
    focal_gamma: Annotated[float, Range(0)] = 2.0
    iou_masks: Literal["best", "all"] = "best"
    all_masks_share: Annotated[float, Range(0, 1)] = 0.0
    iteration_loss: Literal["mean", "sum"] = "mean"
    feedback_gradient: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "recipe")


_OWN_TOKENS = 1 + MASKS  # one token of the IoU and four of the masks


@cache
def encoder_flops(model: ModelConfig, of_weights: float = 1.0, of_products: float = 1.0) -> float:
    """Operations of the image encoder's forward pass for one image, or multiples of those of its layers with
    weights and of the products of queries, keys and values.
    """
    tokens, width = model.side**2, model.width
    windows = -(-model.side // model.window)
    padded = (windows * model.window) ** 2
    flops, products = 2.0 * tokens * width * 3 * model.patch_size**2, 0.0
    if model.backbone:
        with torch.device("meta"):
            backbone = Backbone(model.backbone, model.patch_size, width)
            pixels = torch.empty(1, 3, model.image_size, model.image_size)
        with FlopCounterMode(display=False) as counter:
            backbone(pixels)
        flops = float(counter.get_total_flops())
    for block in range(model.depth):
        keys = tokens if block in model.global_blocks else model.window**2
        queries = tokens if block in model.global_blocks else padded
        flops += 2 * queries * width * 4 * width  # q, k, v and the projection
        products += 2 * 2 * queries * keys * width  # q k', and the product of the result with v
        flops += 2 * tokens * width * 8 * width  # MLP
    flops += 2 * tokens * (width * model.channels + 9 * model.channels**2)
    if model.pixel_features:
        pixel = 3 * 9 + 9 * CONTEXT * HIDDEN + 2 * model.pixel_features
        flops += 2 * tokens * HIDDEN * (16 * pixel + model.channels)
    return of_weights * flops + of_products * products


def decoder_flops(model: ModelConfig, tokens: int, candidates: int) -> float:
    """Operations of one forward pass of the mask decoder for one mask, except operations on tokens alone.

    `tokens`: 5 of the decoder, and the prompts of the mask; `candidates`: 3 for one prompt, 1 for more.
    """
    channels = model.channels
    heads, mask_rank = channels // HEAD_LENGTH, 16
    rows = heads * tokens
    # For each image token: four products with rows of C numbers in each of two layers, and two in the last
    # attention, which only uses the tokens of the IoU and of the candidates.
    attention = 8 * rows * channels + 2 * heads * (1 + candidates) * channels
    earlier_mask = mask_rank * (3 * rows + channels) if candidates == 1 else 0
    upscaling = channels * channels + 4 * (channels // 4) * (channels // 8) * 4
    masks = 16 * candidates * (channels // 8)
    similarity = 16 * (tokens - _OWN_TOKENS) * model.pixel_features
    return 2.0 * model.side**2 * (attention + earlier_mask + upscaling + masks + similarity)


def step_flops(
    model: ModelConfig, recipe: Recipe, images: float, masks: float, frozen: Container[str] = ()
) -> float:
    """Operations of a training step: backward costs twice forward; recomputation does not count.

    A `frozen` "encoder" has no backward pass; that of one with low-rank changes has no gradients of its
    weights. A frozen "decoder" passes gradients to the encoder.
    """
    low_rank = model.lora_rank and model.lora_targets != "mask_decoder"
    encoder = encoder_flops(model, *((1, 1) if "encoder" in frozen else (2 if low_rank else 3, 3)))
    passes = 2 if "decoder" in frozen else 3
    decoder = decoder_flops(model, _OWN_TOKENS + 2, MASKS - 1)
    for number in range(1, 1 + recipe.clicks + recipe.unprompted):
        prompted = min(number, recipe.clicks + max(recipe.unprompted - 1, 0))
        decoder += decoder_flops(model, _OWN_TOKENS + 2 + prompted, 1)
    return images * encoder + passes * masks * decoder


def is_frozen(part: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in part.parameters())
