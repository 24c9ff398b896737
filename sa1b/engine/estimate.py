"""What a step costs, from the sizes alone: operations, memory, time."""

import torch

from sa1b.engine.config import Config
from sa1b.engine.ranks import RankInfo
from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import Recipe

_DENSE_BF16 = {  # operations a second, matrix products without sparsity, by the vendors' data sheets
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that a GPU can do in bf16; None where that is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _DENSE_BF16.items() if known in name), None)


def encoder_flops(model: ModelConfig) -> float:
    """Operations of the encoder's forward pass for one image: 2 for each multiplication and addition."""
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
    """Operations of one round of prompt encoder and mask decoder for one mask, roughly."""
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
    """Operations of a training step: backward costs twice forward; what is computed again does not count."""
    rounds = 1 + recipe.clicks + recipe.unprompted
    return 3 * (images * encoder_flops(model) + masks * rounds * decoder_flops(model))


def peak_seconds(
    model: ModelConfig, recipe: Recipe, images: float, masks: float, rank_info: RankInfo
) -> float | None:
    """Seconds that a training step would take at the devices' peak; over its real seconds that is the MFU."""
    peak = peak_flops(rank_info.device)
    return step_flops(model, recipe, images, masks) / (peak * rank_info.world_size) if peak else None


def describe(config: Config, rank_info: RankInfo, parameters: int, micro_batches: int, images: int) -> str:
    """What --dry-run prints.

    Args:
        parameters: that are trained or frozen, in all.
        micro_batches: of a rank in a step.
        images: in the view.
    """
    data, model = config.data, config.model
    batch = data.global_batch
    share = -(-batch // rank_info.world_size)
    micro = min(data.micro_batch or share, share)
    shards = rank_info.shards if config.parallel.shard == "full" else 1
    held = 4 * parameters / 1e9
    state = held / shards + 3 * held / rank_info.shards  # weights; gradients and two moments
    flops = step_flops(model, config.recipe, batch, batch * data.masks)
    ideal = peak_seconds(model, config.recipe, batch, batch * data.masks, rank_info)
    seconds = "no estimate of the time: the peak of this device is not known"
    if ideal is not None:
        seconds = f"{ideal:.2f} s at the GPUs' peak, of which 40 % is good"
    image_bytes = data.prefetch * micro * 3 * model.image_size**2 / 1e9
    target = data.target_size or model.image_size // 4
    mask_bytes = data.prefetch * micro * data.masks * target**2 / 1e9
    return "\n".join(
        [
            f"ranks         {rank_info.world_size} x {rank_info.device.type}, mode {config.parallel.mode}, "
            f"precision {config.parallel.precision}",
            f"batch         {batch} images = {rank_info.world_size} ranks x {micro_batches} "
            f"micro-batches of up to {micro}",
            f"run           {config.optim.steps:,} steps = {config.optim.steps * batch / images:.1f} epochs "
            f"of {images:,} images",
            f"model         {parameters / 1e6:.1f} M parameters at {model.image_size} x {model.image_size}",
            f"memory        {state:.2f} GB a rank for weights, gradients and optimizer; "
            f"{image_bytes + mask_bytes:.2f} GB for batches read ahead; activations come on top",
            f"step          {flops / 1e12:.2f} TFLOP for up to {data.masks} masks an image; {seconds}",
        ]
    )
