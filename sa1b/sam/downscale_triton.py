"""The features of earlier masks for the prompt encoder, on a CUDA device: Triton kernels.

The two convolutions have kernels of 2 x 2 without overlap, so a token is a function of its 4 x 4 logits.
Separate operators read and write tensors of these 16 numbers, in their orders, some twenty times. Here a
program computes tiles of tokens of one mask, each number in float32, with products of 16 x 16:

    a        = logits of a token @ first          four squares of four channels
    t        = GELU(norm of the channels of a square of a + bias)
    features = GELU(norm of t @ second + bias)

The backward pass computes these again. It adds up the gradients of the parameters in a fixed order. There is
no gradient of the logits, which training detaches.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sa1b.sam.norm_triton import gelu, standard

TILE = 64  # tokens
SPLITS = 4  # programs of a mask in the backward pass
WARPS = 4
NUMBERS = tl.constexpr(16)  # logits of a token, channels of the squares, features
PARAMETERS = 8  # of both layers: weight, bias, gain and offset of the norm


def fits(low_res: Tensor, features: int) -> bool:
    """Whether the kernels support these logits, and this number of features."""
    return features == NUMBERS.value and not low_res.requires_grad


@triton.jit
def logits_of(
    low_res: tl.tensor, mask: tl.tensor, token: tl.tensor, inside: tl.tensor, SIDE: tl.constexpr
) -> tl.tensor:
    """The logits of tokens [TILE, 16]: rows and columns of the squares, then of their pixels."""
    number = tl.arange(0, NUMBERS)
    row = (token // SIDE * 4)[:, None] + number // 8 * 2 + number // 2 % 2
    column = (token % SIDE * 4)[:, None] + number // 4 % 2 * 2 + number % 2
    place = mask * (16 * SIDE * SIDE) + row * (4 * SIDE) + column
    return tl.load(low_res + place, mask=inside[:, None], other=0).to(tl.float32)


@triton.jit
def products_of(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The weights of both convolutions, [4, 4] and [16, 4, 4], as matrices [16, 16]."""
    row, column = tl.arange(0, NUMBERS)[:, None], tl.arange(0, NUMBERS)[None, :]
    of_square = tl.load(first + column % 4 * 4 + row % 4).to(tl.float32)
    return (
        tl.where(row // 4 == column // 4, of_square, 0),
        tl.load(second + column * 16 + row % 4 * 4 + row // 4).to(tl.float32),
    )


@triton.jit
def of_channels(parameter: tl.tensor) -> tl.tensor:
    """A parameter of four channels for each of the 16 numbers."""
    return tl.load(parameter + tl.arange(0, NUMBERS) % 4).to(tl.float32)


@triton.jit
def by_square(x: tl.tensor, eps: tl.constexpr, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """`standard` of the four channels of each square, x [TILE, 16], as [4 TILE, 4]."""
    normal, factor = standard(tl.reshape(x, (4 * TILE, 4)), eps, 4)
    return normal, factor


@triton.jit
def downscale_forward(
    low_res: tl.tensor, first: tl.tensor, bias: tl.tensor, gain: tl.tensor, offset: tl.tensor,
    second: tl.tensor, last_bias: tl.tensor, last_gain: tl.tensor, last_offset: tl.tensor, out: tl.tensor,
    eps: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the features of a tile of tokens."""
    N: tl.constexpr = SIDE * SIDE
    tiles, number = tl.cdiv(N, TILE), tl.arange(0, NUMBERS)
    mask = (tl.program_id(0) // tiles).to(tl.int64)
    token = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    x = logits_of(low_res, mask, token, token < N, SIDE)
    inner, outer = products_of(first, second)
    a = tl.dot(x, inner, input_precision="ieee") + of_channels(bias)
    normal, _ = by_square(a, eps, TILE)
    t, _ = gelu(tl.reshape(normal, (TILE, NUMBERS)) * of_channels(gain) + of_channels(offset))
    z = tl.dot(t, outer, input_precision="ieee") + tl.load(last_bias + number).to(tl.float32)
    normal, _ = standard(z, eps, NUMBERS)
    z = normal * tl.load(last_gain + number).to(tl.float32) + tl.load(last_offset + number).to(tl.float32)
    features, _ = gelu(z)
    place = mask * (NUMBERS * N) + number[None, :] * N + token[:, None]
    tl.store(out + place, features.to(out.dtype.element_ty), mask=(token < N)[:, None])


@triton.jit
def of_normal(
    slope: tl.tensor, normal: tl.tensor, factor: tl.tensor, CHANNELS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The gradient of the input of a norm from that of its result before the gain."""
    along = tl.sum(slope * normal, 1)[:, None] / CHANNELS
    return (slope - tl.sum(slope, 1)[:, None] / CHANNELS - normal * along) * factor


@triton.jit
def downscale_backward(
    low_res: tl.tensor, first: tl.tensor, bias: tl.tensor, gain: tl.tensor, offset: tl.tensor,
    second: tl.tensor, last_bias: tl.tensor, last_gain: tl.tensor, last_offset: tl.tensor,
    gradient: tl.tensor, of_products: tl.tensor, of_others: tl.tensor, eps: tl.constexpr, SIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write this program's sums for the two matrices of `products_of`, and for the other parameters."""
    N: tl.constexpr = SIDE * SIDE
    mask, number = tl.program_id(0).to(tl.int64), tl.arange(0, NUMBERS)
    inner, outer = products_of(first, second)
    factors, last_factors = of_channels(gain), tl.load(last_gain + number).to(tl.float32)
    of_inner, of_outer = tl.zeros((NUMBERS, NUMBERS), tl.float32), tl.zeros((NUMBERS, NUMBERS), tl.float32)
    of_bias, of_gain = tl.zeros((NUMBERS,), tl.float32), tl.zeros((NUMBERS,), tl.float32)
    of_offset, of_last_bias = tl.zeros((NUMBERS,), tl.float32), tl.zeros((NUMBERS,), tl.float32)
    of_last_gain, of_last_offset = tl.zeros((NUMBERS,), tl.float32), tl.zeros((NUMBERS,), tl.float32)
    for start in tl.range(tl.program_id(1) * TILE, N, tl.num_programs(1) * TILE):
        token = start + tl.arange(0, TILE)
        inside = token < N
        x = logits_of(low_res, mask, token, inside, SIDE)
        a = tl.dot(x, inner, input_precision="ieee") + of_channels(bias)
        square, square_factor = by_square(a, eps, TILE)
        normal = tl.reshape(square, (TILE, NUMBERS))
        t, of_t = gelu(normal * factors + of_channels(offset))
        z = tl.dot(t, outer, input_precision="ieee") + tl.load(last_bias + number).to(tl.float32)
        last, last_factor = standard(z, eps, NUMBERS)
        _, of_z = gelu(last * last_factors + tl.load(last_offset + number).to(tl.float32))
        place = mask * (NUMBERS * N) + number[None, :] * N + token[:, None]
        slope = tl.load(gradient + place, mask=inside[:, None], other=0).to(tl.float32) * of_z
        of_last_gain += tl.sum(slope * last, 0)
        of_last_offset += tl.sum(slope, 0)
        slope = of_normal(slope * last_factors, last, last_factor, NUMBERS)
        of_last_bias += tl.sum(slope, 0)
        of_outer = tl.dot(tl.trans(t), slope, of_outer, input_precision="ieee")
        slope = tl.dot(slope, tl.trans(outer), input_precision="ieee") * of_t
        of_gain += tl.sum(slope * normal, 0)
        of_offset += tl.sum(slope, 0)
        slope = of_normal(tl.reshape(slope * factors, (4 * TILE, 4)), square, square_factor, 4)
        slope = tl.reshape(slope, (TILE, NUMBERS))
        of_bias += tl.sum(slope, 0)
        of_inner = tl.dot(tl.trans(x), slope, of_inner, input_precision="ieee")
    program = mask * tl.num_programs(1) + tl.program_id(1)
    of_products += program * (2 * NUMBERS * NUMBERS) + number[:, None] * NUMBERS + number
    tl.store(of_products, of_inner)
    tl.store(of_products + NUMBERS * NUMBERS, of_outer)
    of_others += program * (6 * NUMBERS) + number
    tl.store(of_others, of_bias)
    tl.store(of_others + NUMBERS, of_gain)
    tl.store(of_others + 2 * NUMBERS, of_offset)
    tl.store(of_others + 3 * NUMBERS, of_last_bias)
    tl.store(of_others + 4 * NUMBERS, of_last_gain)
    tl.store(of_others + 5 * NUMBERS, of_last_offset)


class Downscaling(torch.autograd.Function):
    """The features [M, 16, N] of logits [M, 1, 4 side, 4 side], N = side * side, in their number format.

    Parameters of the layers: weight [4, 1, 2, 2], bias, gain and offset of the norm [4]; then weight
    [16, 4, 2, 2] and the others [16].
    """

    @staticmethod
    def forward(ctx: Any, low_res: Tensor, eps: float, *parameters: Tensor) -> Tensor:
        low_res, parameters = low_res.contiguous(), tuple(x.contiguous() for x in parameters)
        masks, side = len(low_res), low_res.shape[-1] // 4
        out = low_res.new_empty(masks, 16, side * side)
        if masks:
            programs = masks * triton.cdiv(side * side, TILE)
            downscale_forward[(programs,)](low_res, *parameters, out, eps, side, TILE, num_warps=WARPS)
        ctx.save_for_backward(low_res, *parameters)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        low_res, *parameters = ctx.saved_tensors
        masks, side = len(low_res), low_res.shape[-1] // 4
        of_products = low_res.new_empty((masks, SPLITS, 2, 16, 16), dtype=torch.float32)
        of_others = low_res.new_empty((masks, SPLITS, 6, 16), dtype=torch.float32)
        if masks:
            downscale_backward[(masks, SPLITS)](
                low_res, *parameters, gradient.contiguous(), of_products, of_others, ctx.eps, side, TILE,
                num_warps=WARPS,
            )  # fmt: skip
        inner, outer = of_products.sum((0, 1))
        squares, others = of_others.sum((0, 1)).split(3)
        gradients = (
            # Of the first matrix, the products of logits and channels of the same square count.
            inner.view(4, 4, 4, 4).diagonal(dim1=0, dim2=2).sum(2).T,
            *squares.view(3, 4, 4).sum(1),
            outer.view(4, 4, 16).transpose(0, 2),
            *others,
        )
        pairs = zip(gradients, parameters, strict=True)
        return None, None, *(x.reshape(parameter.shape).to(parameter.dtype) for x, parameter in pairs)
