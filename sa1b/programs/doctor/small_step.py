"""A forward and backward pass of a very small SAM on synthetic images, for checks that need a real model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sa1b.hashing import Purpose
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.sam.random_values import random_words
from sa1b.sam.targets import Targets

_SIDE = 64  # pixels of an image
_IMAGES, _MASKS = 2, 4


def small_config() -> SamConfig:
    """The preset tiny with a model of some 100,000 parameters."""
    tiny = PRESETS["tiny"]
    assert isinstance(tiny, SamConfig)
    sizes: dict[str, Any] = {"image_size": _SIDE, "width": 32, "depth": 2, "heads": 2, "global_blocks": (1,)}
    model = replace(tiny.model, **sizes, window=2, channels=32, pixel_features=8, drop_path=0.0)
    return replace(tiny, model=model)


def small_model() -> nn.Module:
    """The model on the CPU, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return small_config().build()


def small_inputs(device: torch.device, number: int = 0) -> tuple[Tensor, Targets, Tensor]:
    """The arguments of the model's forward pass: 2 images with 4 masks, other ones for another `number`."""
    key = torch.full((), number, dtype=torch.int64)
    pixels = torch.arange(_IMAGES * 3 * _SIDE**2)
    words = random_words(key, int(Purpose.PROMPT), pixels, torch.zeros_like(pixels))
    images = (words & 255).to(torch.uint8).reshape(_IMAGES, 3, _SIDE, _SIDE)
    corners = torch.arange(_MASKS) * 4 + 8  # squares of 16 pixels on the diagonal
    rows = torch.arange(_SIDE)
    within = (rows >= corners[:, None]) & (rows < corners[:, None] + 16)
    image = torch.arange(_MASKS) * _IMAGES // _MASKS
    targets = Targets(
        masks=(within[:, :, None] & within[:, None, :]).to(torch.uint8).to(device),
        boxes=torch.stack((corners, corners, corners + 15, corners + 15), dim=1).float().to(device),
        points=torch.stack((corners + 8, corners + 8), dim=1).float().to(device),
        image=image.to(device),
        weights=torch.ones(_MASKS, device=device),
        keys=random_words(key, int(Purpose.PROMPT), torch.arange(_MASKS), image).to(device),
        sizes=torch.full((_IMAGES, 2), _SIDE, device=device),
        counts=[_MASKS // _IMAGES] * _IMAGES,
    )
    return images.to(device), targets, random_words(key, int(Purpose.VISIT), image[::2]).to(device)


def small_step(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model with gradients after one backward pass on the device, and its inputs and results."""
    module = small_model().to(device)
    inputs = small_inputs(device)
    sums: dict[str, Tensor] = module(*inputs)
    torch.autograd.backward(sums["loss"])
    return module, {"inputs": inputs, "results": sums}
