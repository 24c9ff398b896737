"""The comparison finds kernels that differ from operators:

TRITON_INTERPRET=1 python -m tests.sam.kernel_proof_cases upscale losses
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.account import as_on_a_gpu
from sa1b.masks import raster_torch
from sa1b.masks.proved import RASTER
from sa1b.masks.raster_torch import first_target, source_pixel
from sa1b.sam import (
    downscale_triton,
    image_to_tokens_triton,
    kernel_comparison,
    losses_triton,
    norm_triton,
    tokens_to_image_triton,
    upscale_triton,
)
from sa1b.sam.image_tokens import IN_USE
from sa1b.sam.kernel_comparison import decoder_errors, raster_differences
from sa1b.sam.model import Sam
from tests.sam.decoder_cases import CONFIG

PASSES = (2, (1, 1)), (10, (1, 1)), (3, (1, 2))
FUNCTIONS = {
    "norm": norm_triton.FewChannelNorm,
    "downscale": downscale_triton.Downscaling,
    "image_to_tokens": image_to_tokens_triton.ImageToTokens,
    "tokens_to_image": tokens_to_image_triton.ReadImage,
    "upscale": upscale_triton.Upscaling,
    "losses": losses_triton.Comparison,
}


def wrong(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function with right results, whose gradients are too large by half of their size."""
    return lambda *arguments: plain(*map(_steeper, arguments))


def _steeper(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return x
    return 1.5 * x - (0.5 * x).detach()


def wrong_results(kernel: str) -> list[str]:
    """What the comparison of a kernel finds wrong, in float16."""
    with as_on_a_gpu(None, IN_USE), mock.patch.object(kernel_comparison, "PASSES", PASSES):
        torch.manual_seed(0)
        errors = decoder_errors(Sam(replace(CONFIG, channels=64)), "fp16", [kernel])  # fewer: no upscaling
    assert len(errors) > 60  # with a scale at which the operators do not overflow
    return [name for name, (error, allowed) in errors.items() if not error <= allowed]


def check(names: Sequence[str]) -> int:
    """Kernels with these names are wrong if their gradients are; returns the number of comparisons."""
    for name, function in ((name, FUNCTIONS[name]) for name in names):
        assert wrong_results(name) == []
        with mock.patch.object(function, "apply", wrong(function.apply)):
            found = wrong_results(name)
            assert {one.split()[0] for one in found} == {"gradient"}, (name, found)
    with mock.patch.object(kernel_comparison, "SIDES", (24,)):
        for name, formula in zip(RASTER, (first_target, source_pixel), strict=True):
            assert raster_differences(name, torch.device("cpu")) == 0
            with mock.patch.object(raster_torch, formula.__name__, lambda *a, right=formula: right(*a) + 1):
                assert raster_differences(name, torch.device("cpu")) > 0
    return 2 * (len(names) + len(RASTER))


if __name__ == "__main__":
    print(f"{check(sys.argv[1:])} comparisons")
