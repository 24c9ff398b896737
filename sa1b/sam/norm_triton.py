"""Layer norms on a CUDA device, with GELU after them, and what the kernels share: Triton kernels.

For layer norms of many rows of few channels, with GELU after them, torch starts a block of 128 threads for
each row, which for 4 to 256 channels takes 3 to 50 times as long as the bytes need. Here a program takes many
rows. It reads the input and writes the output once, and computes in float32. The backward pass keeps only the
input and computes mean and deviation again. Each of its programs takes every n-th tile, adds up the gradients
of weight and bias in registers, number by number, and sums over the rows of a tile once at its end. torch
adds the sums of the programs, so the order of the sums is fixed.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the model on a CUDA device needs triton: pip install 'sa1b[kernels]'") from error

MOST_CHANNELS = 256  # a power of two, as numbers of channels must be
MEMORY = 216_000  # bytes of shared memory that kernels of many rows need, as an H100 has and an A100 has not


class Tiles(NamedTuple):
    """Numbers of a tile, rows * channels; warps of a program; programs of the backward pass."""

    numbers: int
    warps: int
    programs: int = 0


FORWARD = Tiles(4096, 4)
# A thread has 16 numbers of a tile and needs at most 128 registers in the formats of the model, so 4 programs
# run at once on each of the 132 processors of an H100.
BACKWARD = Tiles(2048, 4, 4 * 132)


@triton.jit
def standard(x: tl.tensor, eps: tl.constexpr, CHANNELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rows with mean 0 and variance 1, and the factor of each."""
    x = x - tl.sum(x, 1)[:, None] / CHANNELS
    factor = 1 / tl.sqrt(tl.sum(x * x, 1) / CHANNELS + eps)[:, None]
    return x * factor, factor


@triton.jit
def normalised(
    x: tl.tensor, row: tl.tensor, rows: tl.tensor, eps: tl.constexpr, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Rows with mean 0 and variance 1, the factor of each, their places, and which exist."""
    place, inside = row[:, None] * CHANNELS + tl.arange(0, CHANNELS), (row < rows)[:, None]
    normal, factor = standard(tl.load(x + place, mask=inside, other=0).to(tl.float32), eps, CHANNELS)
    return normal, factor, place, inside


@triton.jit
def gelu(z: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """GELU and its slope, with errors below 1e-6 and 2e-6."""
    # The share of the normal distribution beyond |z| is 2 to the power of a polynomial, fitted to the error
    # of GELU. With erf the fused upscaling has 3,597 instructions for a tile instead of 1,284 (sm_90).
    size = tl.abs(z)
    power = -4.95731701e-4 * size + 7.25309826e-3
    power = power * size - 5.22813512e-2
    power = power * size - 0.459459868
    power = power * size - 1.15104704
    beyond = tl.exp2(power * size - 1)
    density = tl.exp2(-0.7213475204444817 * z * z - 1.3257480647361593)
    return tl.maximum(z, 0) - size * beyond, tl.where(z < 0, beyond, 1 - beyond) + z * density


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, eps: tl.constexpr,
    GELU: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write BLOCK rows."""
    channel = tl.arange(0, CHANNELS)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values, _, place, inside = normalised(x, row, rows, eps, CHANNELS)
    values = values * tl.load(weight + channel).to(tl.float32) + tl.load(bias + channel).to(tl.float32)
    if GELU:
        values, _ = gelu(values)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, gradient: tl.tensor, of_x: tl.tensor, sums: tl.tensor,
    rows: tl.tensor, eps: tl.constexpr, GELU: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of every n-th block of rows, and this program's sums for weight and bias."""
    channel = tl.arange(0, CHANNELS)
    gain, offset = tl.load(weight + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)
    of_gain = tl.zeros((BLOCK, CHANNELS), tl.float32)
    of_bias = tl.zeros((BLOCK, CHANNELS), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < rows:
        normal, factor, place, inside = normalised(x, first + tl.arange(0, BLOCK), rows, eps, CHANNELS)
        slope = tl.load(gradient + place, mask=inside, other=0).to(tl.float32)
        if GELU:
            _, bend = gelu(normal * gain + offset)
            slope = slope * bend
        of_gain += slope * normal
        of_bias += slope
        slope = slope * gain
        along = tl.sum(slope * normal, 1)[:, None] / CHANNELS
        slope = (slope - tl.sum(slope, 1)[:, None] / CHANNELS - normal * along) * factor
        tl.store(of_x + place, slope.to(of_x.dtype.element_ty), mask=inside)
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    sums += 2 * CHANNELS * tl.program_id(0)
    tl.store(sums + channel, tl.sum(of_gain, 0))
    tl.store(sums + CHANNELS + channel, tl.sum(of_bias, 0))


class FewChannelNorm(torch.autograd.Function):
    """The norm of contiguous x [..., C] with weight and bias [C], in the number format of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, gelu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.gelu = eps, gelu
        out = torch.empty_like(x)
        channels, rows, block = _sizes(x, FORWARD)
        if rows:
            norm_forward[(triton.cdiv(rows, block),)](
                x, weight, bias, out, rows, eps, gelu, channels, block, num_warps=FORWARD.warps
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x, sums = gradients(x, weight, bias, gradient.contiguous(), ctx.eps, BACKWARD, gelu=ctx.gelu)
        of_weight, of_bias = sums.sum(0)
        return of_x, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None, None


def gradients(
    x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor, eps: float, tiles: Tiles, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of weight and bias as one summand of each program: [programs, 2, C]."""
    of_x, (channels, rows, block) = torch.empty_like(x), _sizes(x, tiles)
    programs = min(tiles.programs, triton.cdiv(rows, block))
    sums = x.new_zeros((max(programs, 1), 2, channels), dtype=torch.float32)
    if rows:
        norm_backward[(programs,)](
            x, weight, bias, gradient, of_x, sums, rows, eps, gelu, channels, block, num_warps=tiles.warps
        )
    return of_x, sums


def _sizes(x: Tensor, tiles: Tiles) -> tuple[int, int, int]:
    channels = x.shape[-1]
    return channels, x.numel() // channels, tiles.numbers // channels


@triton.jit(do_not_specialize=["count"])
def products_of_rows(
    a: tl.tensor, b: tl.tensor, out: tl.tensor, count: tl.tensor, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the product of each of ROWS pairs of rows, of `count` in all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place, inside = row[:, None] * CHANNELS + tl.arange(0, CHANNELS), (row < count)[:, None]
    first = tl.load(a + place, mask=inside, other=0).to(tl.float32)
    second = tl.load(b + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + row, tl.sum(first * second, 1), mask=row < count)


def products(a: Tensor, b: Tensor) -> Tensor:
    """The products of rows of contiguous tensors [..., C], float32 [...]."""
    out = a.new_empty(a.shape[:-1], dtype=torch.float32)
    if out.numel():
        programs = triton.cdiv(out.numel(), 16)
        products_of_rows[(programs,)](a, b, out, out.numel(), a.shape[-1], 16)
    return out


def precision_of(x: Tensor) -> str:
    """Of products of float32 numbers; others are exact before their sums."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def summed(x: Tensor) -> Tensor:
    """The sum over dimension 1; one summand is its own sum."""
    return x[:, 0] if x.shape[1] == 1 else x.sum(1)


def padded(x: Tensor, rows: int) -> Tensor:
    """Contiguous x [..., R, C] with zeros after its R rows."""
    return (x if x.shape[-2] == rows else F.pad(x, (0, 0, 0, rows - x.shape[-2]))).contiguous()


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block can have; in the interpreter, as many as are needed."""
    if device.type != "cuda":
        return MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))
