"""A training step whose decoder uses all kernels: `TRITON_INTERPRET=1 python -m tests.sam.decoder_cases`."""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from benchmarks.account import KERNELS, as_on_a_gpu
from sa1b.sam import image_to_tokens_triton, image_tokens, tokens_to_image_triton, transformer
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from tests.sam.sketch import case

# 64 image tokens, which are a tile of the kernels.
CONFIG = ModelConfig(image_size=128, width=16, depth=1, heads=1, global_blocks=(), window=2, channels=32)
TOLERANCE = 1e-5  # relative, of the sums and of each gradient's norm


def step(kernels: Sequence[str]) -> dict[str, Tensor]:
    """The sums and gradients of a micro-batch of two images with two masks each."""
    torch.manual_seed(0)
    interactive = Interactive(Sam(CONFIG), Recipe(clicks=2, unprompted=0))
    images, targets, keys = case(4, 2)
    images = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    masks = targets.masks.repeat_interleave(2, 1).repeat_interleave(2, 2)
    targets = replace(
        targets, masks=masks, boxes=2 * targets.boxes, points=2 * targets.points, sizes=2 * targets.sizes
    )
    # In float32, since the IoU of masks in half precision jumps where a pixel changes.
    with (
        as_on_a_gpu(None, kernels),
        mock.patch.object(transformer, "HALF", (torch.float32,)),
        mock.patch.object(image_tokens, "HALF", (torch.float32,)),
    ):
        sums = interactive(images, targets, keys)
        sums["loss"].backward()
    gradients = {name: x.grad for name, x in interactive.named_parameters() if x.grad is not None}
    return {name: x.detach() for name, x in sums.items()} | gradients


def check() -> int:
    """Steps with kernels give the sums and gradients of the step without; returns their number."""
    with (
        mock.patch.object(
            image_to_tokens_triton.ImageToTokens, "apply", wraps=image_to_tokens_triton.ImageToTokens.apply
        ) as one,
        mock.patch.object(
            tokens_to_image_triton.ReadImage, "apply", wraps=tokens_to_image_triton.ReadImage.apply
        ) as other,
    ):
        expected, found = step(()), step(KERNELS)
        assert (one.call_count, other.call_count) == (6, 9)  # three iterations
        small = step([name for name in KERNELS if name != "tokens_to_image"])
        assert (one.call_count, other.call_count) == (12, 9)
    return compare(found, expected) + compare(small, expected)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """The sums and gradients are equal but for rounding errors; returns their number."""
    largest = max(float(x.norm()) for x in expected.values())
    for name, wanted in expected.items():
        error = float((found[name] - wanted).norm() / (wanted.norm() + 0.001 * largest))
        assert error < TOLERANCE, (name, error)
    return len(expected)


if __name__ == "__main__":
    print(f"{check()} sums and gradients")
