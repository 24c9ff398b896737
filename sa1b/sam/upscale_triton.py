"""The end of the mask decoder on a CUDA device, from the first upscaling to the logits: Triton kernels.

As separate operators, norm, GELU, second linear layer, GELU and product with the weights of the
hypernetworks read and write tensors with 8 numbers for each logit. Here a program reads tiles of one mask and
writes logits only. The backward pass keeps only the input and computes the rest again. Products have the
number format of the input, all else is float32. Gradients of parameters are sums in a fixed order. Compiled
by triton 3.6 for sm_90 with 64 channels, a thread has up to 122 registers in the forward pass and 255 in the
backward pass, and none is spilled.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the upscaling on a CUDA device needs triton: pip install 'sa1b[kernels]'") from error

from sa1b.sam.norm_triton import gelu, normalised

FORMATS = (torch.bfloat16, torch.float16)
CHANNELS = (16, 32, 64)  # of the input
BLOCK = 64  # rows of a tile; a row is a token of the first upscaling and has four logits
SPLITS = 8  # programs of a mask
COLUMNS = tl.constexpr(16)  # of the products with weights: four logits of up to four candidates
# With fewer rows or warps the sums of the backward pass do not fit in registers.
FORWARD, BACKWARD = {"num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 2}


@triton.jit
def spread(weights: tl.tensor, K: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Weights [K, D] as the matrix [4 D, COLUMNS] from the features of a row to its logits."""
    feature, column = tl.arange(0, 4 * D)[:, None], tl.arange(0, COLUMNS)[None, :]
    used = (feature // D == column % 4) & (column < 4 * K)
    return tl.load(weights + column // 4 * D + feature % D, mask=used, other=0)


@triton.jit(do_not_specialize=["rows"])
def upscale_forward(
    x: tl.tensor, gain: tl.tensor, shift: tl.tensor, matrix: tl.tensor, bias: tl.tensor, weights: tl.tensor,
    out: tl.tensor, rows: tl.tensor, eps: tl.constexpr, C: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the logits of every n-th tile of a mask."""
    mask = tl.program_id(0).to(tl.int64)
    x += mask * rows * C
    out += mask * rows * 4 * K
    dtype: tl.constexpr = x.dtype.element_ty
    channel, feature, column = tl.arange(0, C), tl.arange(0, 4 * D), tl.arange(0, COLUMNS)
    second = tl.load(matrix + feature[None, :] * C + channel[:, None])
    hyper = spread(weights + mask * K * D, K, D)
    for first in tl.range(tl.program_id(1) * BLOCK, rows, tl.num_programs(1) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        normal, _, _, inside = normalised(x, row, rows, eps, C)
        z = normal * tl.load(gain + channel).to(tl.float32) + tl.load(shift + channel).to(tl.float32)
        t, _ = gelu(z)
        z = tl.dot(t.to(dtype), second, input_precision="ieee")
        h, _ = gelu(z + tl.load(bias + feature % D).to(tl.float32))
        logits = tl.dot(h.to(dtype), hyper, input_precision="ieee")
        place = column // 4 * (rows * 4) + row[:, None] * 4 + column % 4
        tl.store(out + place, logits.to(dtype), mask=inside & (column < 4 * K))


@triton.jit(do_not_specialize=["rows"])
def upscale_backward(
    x: tl.tensor, gain: tl.tensor, shift: tl.tensor, matrix: tl.tensor, bias: tl.tensor, weights: tl.tensor,
    gradient: tl.tensor, of_x: tl.tensor, of_norm: tl.tensor, of_matrix: tl.tensor, of_bias: tl.tensor,
    of_weights: tl.tensor, rows: tl.tensor, eps: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of every n-th tile of a mask, and this program's sums for the parameters."""
    mask = tl.program_id(0).to(tl.int64)
    program = mask * tl.num_programs(1) + tl.program_id(1)
    x += mask * rows * C
    of_x += mask * rows * C
    gradient += mask * rows * 4 * K
    dtype: tl.constexpr = x.dtype.element_ty
    channel, feature, column = tl.arange(0, C), tl.arange(0, 4 * D), tl.arange(0, COLUMNS)
    second = tl.load(matrix + feature[:, None] * C + channel[None, :])
    hyper = spread(weights + mask * K * D, K, D)
    ones = tl.full((BLOCK, COLUMNS), 1, dtype)
    # The sums for the norm keep 8 of 16 rows: a thread has rows n and n + 8 of the product.
    gains = tl.zeros((BLOCK // 16, 8, C), tl.float32)
    shifts = tl.zeros((BLOCK // 16, 8, C), tl.float32)
    matrices = tl.zeros((4 * D, C), tl.float32)
    biases = tl.zeros((4 * D, COLUMNS), tl.float32)
    products = tl.zeros((4 * D, COLUMNS), tl.float32)
    for first in tl.range(tl.program_id(1) * BLOCK, rows, tl.num_programs(1) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        logit = column // 4 * (rows * 4) + row[:, None] * 4 + column % 4
        slopes = tl.load(gradient + logit, mask=(row < rows)[:, None] & (column < 4 * K), other=0)
        normal, factor, _, _ = normalised(x, row, rows, eps, C)
        factors = tl.load(gain + channel).to(tl.float32)
        t, of_t = gelu(normal * factors + tl.load(shift + channel).to(tl.float32))
        t = t.to(dtype)
        # The features are transposed, (4 D, BLOCK), so that the sums over rows take them from registers.
        z = tl.dot(second, tl.trans(t), input_precision="ieee")
        h, of_z = gelu(z + tl.load(bias + feature % D).to(tl.float32)[:, None])
        products = tl.dot(h.to(dtype), slopes, products, input_precision="ieee")
        of_z = (of_z * tl.dot(hyper, tl.trans(slopes), input_precision="ieee")).to(dtype)
        biases = tl.dot(of_z, ones, biases, input_precision="ieee")
        matrices = tl.dot(of_z, t, matrices, input_precision="ieee")
        slope = tl.dot(tl.trans(of_z), second, input_precision="ieee") * of_t
        gains += tl.sum(tl.reshape(slope * normal, (BLOCK // 16, 2, 8, C)), 1)
        shifts += tl.sum(tl.reshape(slope, (BLOCK // 16, 2, 8, C)), 1)
        slope = slope * factors
        along = tl.sum(slope * normal, 1)[:, None] / C
        slope = (slope - tl.sum(slope, 1)[:, None] / C - normal * along) * factor
        # Computed again: addresses and mask that are kept from the load would not fit in registers.
        tl.store(of_x + row[:, None] * C + channel, slope.to(dtype), mask=(row < rows)[:, None])
    of_norm += 2 * C * program
    tl.store(of_norm + channel, tl.sum(tl.sum(gains, 0), 0))
    tl.store(of_norm + C + channel, tl.sum(tl.sum(shifts, 0), 0))
    tl.store(of_matrix + (4 * D * program + feature[:, None]) * C + channel, matrices)
    tl.store(of_bias + 4 * D * program + feature, tl.sum(tl.where(column == 0, biases, 0), 1))
    # Of the products of features and logits, those of the same quarter of a row count.
    products = tl.where(feature[:, None] // D == column % 4, products, 0)
    products = tl.sum(tl.sum(tl.reshape(products, (4, D, COLUMNS // 4, 4)), 3), 0)  # (D, candidates)
    candidate = tl.arange(0, COLUMNS // 4)[None, :]
    place = (program * K + candidate) * D + tl.arange(0, D)[:, None]
    tl.store(of_weights + place, products, mask=candidate < K)


class Upscaling(torch.autograd.Function):
    """Logits [M, K, 16 N] of contiguous x [M, N, 4, C] in a format of FORMATS, with C of CHANNELS.

    `gain` and `shift` [C] are those of the norm, `matrix` [4 D, C] and `bias` [D] those of the second linear
    layer, in any number format; D = C / 2. `weights` [M, K, D], K up to 4, have the format of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        matrix: Tensor,
        bias: Tensor,
        weights: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.formats = gain.dtype, shift.dtype, matrix.dtype, bias.dtype
        inputs = (x, gain, shift, matrix.to(x.dtype).contiguous(), bias, weights.contiguous())
        ctx.save_for_backward(*inputs)
        ctx.eps = eps
        masks, count, length = weights.shape
        rows = x.shape[1] * x.shape[2]
        out = x.new_empty(masks, count, 4 * rows)
        if out.numel():
            upscale_forward[(masks, SPLITS)](
                *inputs, out, rows, eps, x.shape[-1], length, count, BLOCK, **FORWARD
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a recomputed iteration gives them once
        x, weights = saved[0], saved[-1]
        (masks, count, length), channels = weights.shape, x.shape[-1]
        of_x = torch.empty_like(x)
        shapes = ((2, channels), (4 * length, channels), (4, length), (count, length))
        sums = [x.new_empty(masks, SPLITS, *shape, dtype=torch.float32) for shape in shapes]
        if gradient.numel():
            upscale_backward[(masks, SPLITS)](
                *saved, gradient.contiguous(), of_x, *sums, x.shape[1] * x.shape[2], ctx.eps,
                channels, length, count, BLOCK, **BACKWARD,
            )  # fmt: skip
        of_norm, of_matrix, of_bias, of_weights = sums
        totals = (*of_norm.sum((0, 1)), of_matrix.sum((0, 1)), of_bias.sum((0, 1, 2)))
        of_parameters = [total.to(dtype) for total, dtype in zip(totals, ctx.formats, strict=True)]
        return of_x, *of_parameters, of_weights.sum(1).to(weights.dtype), None
