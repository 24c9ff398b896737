"""Floating-point operations of the model, computed from its sizes: 2 per multiply-add."""

from collections.abc import Container

from torch import nn

from sa1b.sam.mask_decoder import HEAD_LENGTH, MASKS
from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import Recipe
from sa1b.sam.similarity import CONTEXT, HIDDEN

_OWN_TOKENS = 1 + MASKS  # one token of the IoU and four of the masks


def encoder_flops(model: ModelConfig) -> float:
    """Operations of the image encoder's forward pass for one image."""
    tokens, width = model.side**2, model.width
    windows = -(-model.side // model.window)
    padded = (windows * model.window) ** 2
    flops = 2.0 * tokens * width * 3 * model.patch_size**2
    for block in range(model.depth):
        keys = tokens if block in model.global_blocks else model.window**2
        queries = tokens if block in model.global_blocks else padded
        flops += 2 * queries * width * 4 * width  # q, k, v and the projection
        flops += 2 * 2 * queries * keys * width  # q k', and the product of the result with v
        flops += 2 * tokens * width * 8 * width  # MLP
    flops += 2 * tokens * (width * model.channels + 9 * model.channels**2)
    if model.pixel_features:
        pixel = 3 * 9 + 9 * CONTEXT * HIDDEN + 2 * model.pixel_features
        flops += 2 * tokens * HIDDEN * (16 * pixel + model.channels)
    return flops


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

    A `frozen` "encoder" has no backward pass; a frozen "decoder" passes gradients to the encoder.
    """
    passes = 1 if "encoder" in frozen else 3, 2 if "decoder" in frozen else 3
    decoder = decoder_flops(model, _OWN_TOKENS + 2, MASKS - 1)
    for number in range(1, 1 + recipe.clicks + recipe.unprompted):
        prompted = min(number, recipe.clicks + max(recipe.unprompted - 1, 0))
        decoder += decoder_flops(model, _OWN_TOKENS + 2 + prompted, 1)
    return passes[0] * images * encoder_flops(model) + passes[1] * masks * decoder


def is_frozen(part: nn.Module) -> bool:
    """Whether no parameter of a part is trained; False if they are on other stages of a pipeline."""
    trained = [parameter.requires_grad for parameter in part.parameters()]
    return bool(trained) and not any(trained)
