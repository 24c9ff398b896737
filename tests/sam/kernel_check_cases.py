"""Kernels that differ from operators are left out:

TRITON_INTERPRET=1 python -m tests.sam.kernel_check_cases upscale losses
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.account import as_on_a_gpu
from sa1b.sam import (
    downscale_triton,
    image_to_tokens_triton,
    kernel_check,
    losses_triton,
    norm_triton,
    tokens_to_image_triton,
    upscale_triton,
)
from sa1b.sam.image_tokens import LEFT_OUT
from sa1b.sam.kernel_check import leave_out_different
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


def refuses(*arguments: Any) -> Any:
    raise RuntimeError("out of shared memory\nand more")


def left_out() -> dict[str, str]:
    """What the comparison leaves out, in float16; the process uses all kernels again after it."""
    try:
        with (
            as_on_a_gpu(None),
            torch.autocast("cpu", dtype=torch.float16),
            mock.patch.object(kernel_check, "PASSES", PASSES),
        ):
            torch.manual_seed(0)
            found = leave_out_different(Sam(replace(CONFIG, channels=64)))  # fewer have no upscaling
            assert set(found) == LEFT_OUT
            return found
    finally:
        LEFT_OUT.clear()


def check(names: Sequence[str]) -> int:
    """Kernels with these names are left out when they are wrong or fail; returns the number of comparisons."""
    assert left_out() == {}
    for name, function in ((name, FUNCTIONS[name]) for name in names):
        with mock.patch.object(function, "apply", wrong(function.apply)):
            assert list(found := left_out()) == [name], (name, found)
            assert "of its norm, where" in found[name], found
        with mock.patch.object(function, "apply", refuses):
            assert (found := left_out()) == {name: "RuntimeError: out of shared memory"}, (name, found)
    return 1 + 2 * len(names)


if __name__ == "__main__":
    print(f"{check(sys.argv[1:])} comparisons")
