"""The end of the mask decoder on a CUDA device, from the image tokens to the logits: Triton kernels.

As separate operators, both linear layers, norm, GELU and product with the weights of the hypernetworks read
and write tensors with 8 numbers for each logit. Here a program reads tiles of image tokens of one mask and
writes logits only. The backward pass computes the rest again, and writes the gradient of the result of the
first layer, whose products with weight and tokens follow in torch. Products have the number format of the
input, all else is float32. Gradients of parameters are sums in a fixed order.
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

from sa1b.sam.norm_triton import gelu, standard

FORMATS = (torch.bfloat16, torch.float16)
CHANNELS = (16, 32, 64)  # after the first layer, which makes four rows of an image token
TILE = 64  # image tokens; a program computes one row of each at a time, which has four logits
SPLITS = 8  # programs of a mask
COLUMNS = tl.constexpr(16)  # of the products with weights: four logits of up to four candidates
# With fewer rows or warps the sums of the backward pass do not fit in registers.
FORWARD, BACKWARD = {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}


@triton.jit
def spread(weights: tl.tensor, K: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Weights [K, D] as the matrix [4 D, COLUMNS] from the features of a row to its logits."""
    feature, column = tl.arange(0, 4 * D)[:, None], tl.arange(0, COLUMNS)[None, :]
    used = (feature // D == column % 4) & (column < 4 * K)
    return tl.load(weights + column // 4 * D + feature % D, mask=used, other=0)


@triton.jit
def row_of(
    tokens: tl.tensor, first: tl.tensor, base: tl.tensor, quarter: tl.tensor, WIDTH: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A row of each of the tokens [TILE, WIDTH] after the first layer, [TILE, C]."""
    channel, width = tl.arange(0, C), tl.arange(0, WIDTH)
    weight = tl.load(first + (quarter * C + channel)[None, :] * WIDTH + width[:, None])
    return tl.dot(tokens, weight, input_precision="ieee") + tl.load(base + channel).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def upscale_forward(
    image: tl.tensor, first: tl.tensor, base: tl.tensor, gain: tl.tensor, shift: tl.tensor, matrix: tl.tensor,
    bias: tl.tensor, weights: tl.tensor, out: tl.tensor, count: tl.tensor, eps: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the logits of every n-th tile of a mask of `count` image tokens."""
    mask = tl.program_id(0).to(tl.int64)
    image += mask * count * WIDTH
    out += mask * count * 16 * K
    dtype: tl.constexpr = image.dtype.element_ty
    channel, feature, column = tl.arange(0, C), tl.arange(0, 4 * D), tl.arange(0, COLUMNS)
    second = tl.load(matrix + feature[None, :] * C + channel[:, None])
    hyper = spread(weights + mask * K * D, K, D)
    for start in tl.range(tl.program_id(1) * TILE, count, tl.num_programs(1) * TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < count)[:, None]
        tokens = tl.load(image + token[:, None] * WIDTH + tl.arange(0, WIDTH), mask=inside, other=0)
        for quarter in tl.range(4):
            normal, _ = standard(row_of(tokens, first, base, quarter, WIDTH, C), eps, C)
            z = normal * tl.load(gain + channel).to(tl.float32) + tl.load(shift + channel).to(tl.float32)
            t, _ = gelu(z)
            z = tl.dot(t.to(dtype), second, input_precision="ieee")
            h, _ = gelu(z + tl.load(bias + feature % D).to(tl.float32))
            logits = tl.dot(h.to(dtype), hyper, input_precision="ieee")
            place = column // 4 * (count * 16) + (token[:, None] * 4 + quarter) * 4 + column % 4
            tl.store(out + place, logits.to(dtype), mask=inside & (column < 4 * K))


@triton.jit(do_not_specialize=["count"])
def upscale_backward(
    image: tl.tensor, first: tl.tensor, base: tl.tensor, gain: tl.tensor, shift: tl.tensor, matrix: tl.tensor,
    bias: tl.tensor, weights: tl.tensor, gradient: tl.tensor, of_x: tl.tensor, of_norm: tl.tensor,
    of_matrix: tl.tensor, of_bias: tl.tensor, of_weights: tl.tensor, count: tl.tensor, eps: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of every n-th tile of a mask after the first layer, and this program's sums for the
    parameters.
    """
    mask = tl.program_id(0).to(tl.int64)
    program = mask * tl.num_programs(1) + tl.program_id(1)
    image += mask * count * WIDTH
    of_x += mask * count * 4 * C
    gradient += mask * count * 16 * K
    dtype: tl.constexpr = image.dtype.element_ty
    channel, feature, column = tl.arange(0, C), tl.arange(0, 4 * D), tl.arange(0, COLUMNS)
    second = tl.load(matrix + feature[:, None] * C + channel[None, :])
    hyper = spread(weights + mask * K * D, K, D)
    ones = tl.full((TILE, COLUMNS), 1, dtype)
    # The sums for norm and bias keep 8 of 16 rows: a thread has rows n and n + 8 of the product.
    gains = tl.zeros((TILE // 16, 8, C), tl.float32)
    shifts = tl.zeros((TILE // 16, 8, C), tl.float32)
    bases = tl.zeros((TILE // 16, 8, C), tl.float32)
    matrices = tl.zeros((4 * D, C), tl.float32)
    biases = tl.zeros((4 * D, COLUMNS), tl.float32)
    products = tl.zeros((4 * D, COLUMNS), tl.float32)
    for start in tl.range(tl.program_id(1) * TILE, count, tl.num_programs(1) * TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < count)[:, None]
        tokens = tl.load(image + token[:, None] * WIDTH + tl.arange(0, WIDTH), mask=inside, other=0)
        for quarter in tl.range(4):
            row = token * 4 + quarter
            logit = column // 4 * (count * 16) + row[:, None] * 4 + column % 4
            slopes = tl.load(gradient + logit, mask=inside & (column < 4 * K), other=0)
            normal, factor = standard(row_of(tokens, first, base, quarter, WIDTH, C), eps, C)
            factors = tl.load(gain + channel).to(tl.float32)
            t, of_t = gelu(normal * factors + tl.load(shift + channel).to(tl.float32))
            t = t.to(dtype)
            # The features are transposed, (4 D, TILE), so that the sums over rows take them from registers.
            z = tl.dot(second, tl.trans(t), input_precision="ieee")
            h, of_z = gelu(z + tl.load(bias + feature % D).to(tl.float32)[:, None])
            products = tl.dot(h.to(dtype), slopes, products, input_precision="ieee")
            of_z = (of_z * tl.dot(hyper, tl.trans(slopes), input_precision="ieee")).to(dtype)
            biases = tl.dot(of_z, ones, biases, input_precision="ieee")
            matrices = tl.dot(of_z, t, matrices, input_precision="ieee")
            slope = tl.dot(tl.trans(of_z), second, input_precision="ieee") * of_t
            gains += tl.sum(tl.reshape(slope * normal, (TILE // 16, 2, 8, C)), 1)
            shifts += tl.sum(tl.reshape(slope, (TILE // 16, 2, 8, C)), 1)
            slope = slope * factors
            along = tl.sum(slope * normal, 1)[:, None] / C
            slope = (slope - tl.sum(slope, 1)[:, None] / C - normal * along) * factor
            bases += tl.sum(tl.reshape(slope, (TILE // 16, 2, 8, C)), 1)
            # Computed again: addresses and mask that are kept from the load would not fit in registers.
            tl.store(of_x + row[:, None] * C + channel, slope.to(dtype), mask=(token < count)[:, None])
    of_norm += 3 * C * program
    tl.store(of_norm + channel, tl.sum(tl.sum(gains, 0), 0))
    tl.store(of_norm + C + channel, tl.sum(tl.sum(shifts, 0), 0))
    tl.store(of_norm + 2 * C + channel, tl.sum(tl.sum(bases, 0), 0))
    tl.store(of_matrix + (4 * D * program + feature[:, None]) * C + channel, matrices)
    tl.store(of_bias + 4 * D * program + feature, tl.sum(tl.where(column == 0, biases, 0), 1))
    # Of the products of features and logits, those of the same quarter of a row count.
    products = tl.where(feature[:, None] // D == column % 4, products, 0)
    products = tl.sum(tl.sum(tl.reshape(products, (4, D, COLUMNS // 4, 4)), 3), 0)  # (D, candidates)
    candidate = tl.arange(0, COLUMNS // 4)[None, :]
    place = (program * K + candidate) * D + tl.arange(0, D)[:, None]
    tl.store(of_weights + place, products, mask=candidate < K)


def fits(image: Tensor, channels: int) -> bool:
    """Whether the kernels support image tokens [M, N, W], and C channels after the first layer."""
    width = image.shape[-1]
    return image.dtype in FORMATS and channels in CHANNELS and width & (width - 1) == 0 and 16 <= width <= 256


class Upscaling(torch.autograd.Function):
    """Logits [M, K, 16 N] of image tokens [M, N, W] in a format of FORMATS.

    `first` [4 C, W] and `base` [C], with C of CHANNELS, are weight and bias of the first layer, `gain` and
    `shift` [C] those of the norm, `matrix` [4 D, C] and `bias` [D] those of the second layer, in any number
    format; D = C / 2. `weights` [M, K, D], K up to 4, have the format of the image.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, first: Tensor, base: Tensor, gain: Tensor, shift: Tensor, matrix: Tensor,
        bias: Tensor, weights: Tensor, eps: float,
    ) -> Tensor:  # fmt: skip
        ctx.formats = [x.dtype for x in (first, gain, shift, base, matrix, bias)]
        first, matrix = (x.to(image.dtype).contiguous() for x in (first, matrix))
        inputs = (image.contiguous(), first, base, gain, shift, matrix, bias, weights.contiguous())
        ctx.save_for_backward(*inputs)
        ctx.eps = eps
        (masks, candidates, length), (count, width) = weights.shape, image.shape[1:]
        out = image.new_empty(masks, candidates, 16 * count)
        if out.numel():
            upscale_forward[(masks, SPLITS)](
                *inputs, out, count, eps, width, len(base), length, candidates, TILE, **FORWARD
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a recomputed iteration gives them once
        (image, first, base), weights = saved[:3], saved[-1]
        (masks, candidates, length), (count, width), channels = weights.shape, image.shape[1:], len(base)
        of_x = image.new_empty(masks, count, 4 * channels)
        shapes = ((3, channels), (4 * length, channels), (4, length), (candidates, length))
        sums = [image.new_empty(masks, SPLITS, *shape, dtype=torch.float32) for shape in shapes]
        if gradient.numel():
            upscale_backward[(masks, SPLITS)](
                *saved, gradient.contiguous(), of_x, *sums, count, ctx.eps, width, channels, length,
                candidates, TILE, **BACKWARD,
            )  # fmt: skip
        of_norm, of_matrix, of_bias, of_weights = sums
        rows = of_x.flatten(0, 1)
        of_first = rows.T @ image.flatten(0, 1)
        totals = (of_first, *of_norm.sum((0, 1)), of_matrix.sum((0, 1)), of_bias.sum((0, 1, 2)))
        parameters = [x.to(dtype) for x, dtype in zip(totals, ctx.formats, strict=True)]
        of_first, of_gain, of_shift, of_base, of_matrix, of_bias = parameters
        of_image = (rows @ first).view(image.shape)
        of_weights = of_weights.sum(1).to(weights.dtype)
        return of_image, of_first, of_base, of_gain, of_shift, of_matrix, of_bias, of_weights, None
