"""Layer norm of many rows of few channels on a CUDA device, with GELU after it: Triton kernels.

torch starts a block of 128 threads for each row, which for 4 to 256 channels takes 3 to 50 times as long as
the bytes need. Here a program takes many rows. It reads the input and writes the output once, and computes in
float32. The backward pass keeps only the input and computes mean and deviation again. Gradients of weight and
bias are sums in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("layer norms on a CUDA device need triton: pip install 'sa1b[kernels]'") from error

MOST_CHANNELS = 256  # a power of two, as every number of channels must be
NUMBERS = 4096  # of a tile: rows * channels
PROGRAMS = 1024  # of the backward pass, each with a partial sum of the gradients of weight and bias
WARPS = 4


@triton.jit
def normalised(
    x: tl.tensor, eps: tl.constexpr, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Rows with mean 0 and variance 1, and the factor of each row."""
    x = x - tl.sum(x, 1)[:, None] / CHANNELS
    factor = 1 / tl.sqrt(tl.sum(x * x, 1) / CHANNELS + eps)
    return x * factor[:, None], factor


@triton.jit(do_not_specialize=["rows"])
def forward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.constexpr,
    GELU: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write BLOCK rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    place, inside = row[:, None] * CHANNELS + channel, (row < rows)[:, None]
    found, _ = normalised(tl.load(x + place, mask=inside, other=0).to(tl.float32), eps, CHANNELS)
    found = found * tl.load(weight + channel).to(tl.float32) + tl.load(bias + channel).to(tl.float32)
    if GELU:
        found = 0.5 * found * (1 + tl.erf(found * 0.7071067811865476))
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    gradient: tl.tensor,
    of_x: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    eps: tl.constexpr,
    GELU: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient of every n-th block of rows, and this program's sums for weight and bias."""
    channel = tl.arange(0, CHANNELS)
    gain = tl.load(weight + channel).to(tl.float32)
    of_gain = tl.zeros((CHANNELS,), tl.float32)
    of_bias = tl.zeros((CHANNELS,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < rows:
        row = first + tl.arange(0, BLOCK)
        place, inside = row[:, None] * CHANNELS + channel, (row < rows)[:, None]
        found, factor = normalised(tl.load(x + place, mask=inside, other=0).to(tl.float32), eps, CHANNELS)
        slope = tl.load(gradient + place, mask=inside, other=0).to(tl.float32)
        if GELU:
            z = found * gain + tl.load(bias + channel).to(tl.float32)
            density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
            slope = slope * (0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * density)
        of_gain += tl.sum(slope * found, 0)
        of_bias += tl.sum(slope, 0)
        slope = slope * gain
        along = tl.sum(slope * found, 1)[:, None] / CHANNELS
        slope = (slope - tl.sum(slope, 1)[:, None] / CHANNELS - found * along) * factor[:, None]
        tl.store(of_x + place, slope.to(of_x.dtype.element_ty), mask=inside)
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    sums += 2 * CHANNELS * tl.program_id(0)
    tl.store(sums + channel, of_gain)
    tl.store(sums + CHANNELS + channel, of_bias)


class FewChannelNorm(torch.autograd.Function):
    """The norm of contiguous x [..., C] with weight and bias [C], in the number format of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, gelu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.gelu = eps, gelu
        out = torch.empty_like(x)
        channels, rows, block = _sizes(x)
        if rows:
            forward[(triton.cdiv(rows, block),)](
                x, weight, bias, out, rows, eps, gelu, channels, block, num_warps=WARPS
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x, (channels, rows, block) = torch.empty_like(x), _sizes(x)
        programs = min(PROGRAMS, triton.cdiv(rows, block))
        sums = x.new_zeros((max(programs, 1), 2, channels), dtype=torch.float32)
        if rows:
            backward[(programs,)](
                x, weight, bias, gradient.contiguous(), of_x, sums, rows, ctx.eps, ctx.gelu, channels, block,
                num_warps=WARPS,
            )  # fmt: skip
        of_weight, of_bias = sums.sum(0)
        return of_x, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None, None


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Channels, rows, and rows of a tile."""
    channels = x.shape[-1]
    return channels, x.numel() // channels, NUMBERS // channels
