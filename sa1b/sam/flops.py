"""Operations of the model, from its sizes alone: 2 for each multiplication and addition."""

from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import Recipe


def encoder_flops(model: ModelConfig) -> float:
    """Of the image encoder's forward pass for one image."""
    tokens, width = model.side**2, model.width
    windows = -(-model.side // model.window)
    padded = (windows * model.window) ** 2
    flops = 2.0 * tokens * width * 3 * model.patch_size**2
    for block in range(model.depth):
        seen = tokens if block in model.global_blocks else model.window**2
        inside = tokens if block in model.global_blocks else padded
        flops += 2 * inside * width * 4 * width  # q, k, v and the projection
        flops += 2 * 2 * inside * seen * width  # q k' and its product with v
        flops += 2 * tokens * width * 8 * width  # MLP
    return flops + 2 * tokens * (width * model.channels + 9 * model.channels**2)


def decoder_flops(model: ModelConfig) -> float:
    """Of one iteration of prompt encoder and mask decoder for one mask, roughly."""
    tokens, channels = model.side**2, model.channels
    # Per image token: two layers with two cross attentions at half width and the final one, each with two
    # products of C x C/2 on the image's side; the upscaling to a quarter and to an eighth of the channels.
    attention = 2 * tokens * channels * (channels // 2) * 2 * 5
    upscaling = (
        2 * tokens * channels * (channels // 4) * 4 + 2 * 4 * tokens * (channels // 4) * (channels // 8) * 4
    )
    masks = 2 * 16 * tokens * (channels // 8) * 4
    return float(attention + upscaling + masks)


def step_flops(model: ModelConfig, recipe: Recipe, images: float, masks: float) -> float:
    """Of a training step: backward costs twice forward; what is computed again does not count."""
    iterations = 1 + recipe.clicks + recipe.unprompted
    return 3 * (images * encoder_flops(model) + masks * iterations * decoder_flops(model))
