"""The attention of image tokens to the tokens of their mask on a CUDA device, as Triton kernels.

With its residual and norm. x are the N image tokens of C channels of a mask, p their positions, and k, b, v
the keys, biases and values of H heads * T tokens, with the projections of the image applied to them (see
sa1b.sam.transformer):

    weights = softmax of k (x + p)' + b over the T tokens of each head
    out     = norm(x + weights' v)

A program computes a tile of image tokens. The forward pass reads x once and writes out. Nothing else is kept
for the backward pass, which computes weights and sum again: one kernel writes the gradients of x and of the
sum before the norm, and another one reads the latter and adds up the gradients of keys, biases and values, a
block of rows in a program. All sums are in float32 and in a fixed order.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sa1b.sam.norm_triton import MEMORY, MOST_CHANNELS, padded, precision_of, shared_memory, summed

MOST_TOKENS = 16  # of a head; all heads are padded to so many


class Places(NamedTuple):
    """How programs divide the image tokens: tokens of a tile, tiles of a program, warps, stages of loads."""

    tile: int
    steps: int
    warps: int
    stages: int


# On an H100, ptxas 12.8 loses descriptors of products if an operand in shared memory has rows of 32 numbers.
FORWARD_PLACES = BACKWARD_PLACES = Places(64, 8, 8, 1)
ROWS_PLACES = Places(32, 128, 8, 2)  # of the gradients of keys, biases and values
# With less than MEMORY bytes of shared memory, without such products. The last: half of the heads a program.
SMALL_PLACES = Places(32, 1, 8, 1), Places(32, 1, 8, 1), Places(32, 128, 8, 1)


def places_for(image: Tensor) -> tuple[Places, Places, Places]:
    """The places of the three kernels for these image tokens [..., N, C]."""
    large = shared_memory(image.device) >= MEMORY
    every = (FORWARD_PLACES, BACKWARD_PLACES, ROWS_PLACES) if large else SMALL_PLACES
    forward, backward, rows = (x._replace(steps=gcd(image.shape[-2] // x.tile, x.steps)) for x in every)
    return forward, backward, rows


def fits(tokens: int, heads: int, keys: int, channels: int) -> bool:
    """Whether the kernels support N image tokens, H heads of T tokens and C channels."""
    powers = all(x & (x - 1) == 0 for x in (heads, channels))
    every = FORWARD_PLACES, BACKWARD_PLACES, ROWS_PLACES, *SMALL_PLACES
    whole = all(tokens % x.tile == 0 for x in every)
    return powers and whole and keys <= MOST_TOKENS and 16 <= channels <= MOST_CHANNELS


@triton.jit
def weights_of(logits: tl.tensor, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The softmax of logits [HEADS * SIZE, TILE] over the tokens of each head."""
    logits = tl.reshape(logits, (HEADS, SIZE, TILE))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None, :])
    return tl.reshape(weights / tl.sum(weights, 1)[:, None, :], (HEADS * SIZE, TILE))


@triton.jit
def slope_of(
    weights: tl.tensor, steep: tl.tensor, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The gradient of the logits from that of the weights, [HEADS * SIZE, TILE]."""
    weights, steep = tl.reshape(weights, (HEADS, SIZE, TILE)), tl.reshape(steep, (HEADS, SIZE, TILE))
    steep = steep * weights
    return tl.reshape(steep - weights * tl.sum(steep, 1)[:, None, :], (HEADS * SIZE, TILE))


@triton.jit
def weights_and_tile(
    image: tl.tensor, position: tl.tensor, features: tl.tensor, basis: tl.tensor, key: tl.tensor,
    bias: tl.tensor, mask: tl.tensor, token: tl.tensor, PRECISION: tl.constexpr, RANK: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The weights [HEADS * SIZE, TILE] in the format of the image, and x' [CHANNELS, TILE] in float32."""
    form = image.dtype.element_ty
    channel = tl.arange(0, CHANNELS)
    place = token[None, :] * CHANNELS + channel[:, None]
    x = tl.load(image + place).to(tl.float32)
    if RANK > 0:
        rank = tl.arange(0, RANK)
        base = tl.load(basis + rank[None, :] * CHANNELS + channel[:, None])
        of_mask = tl.load(features + mask * (RANK * N) + rank[:, None] * N + token[None, :])
        x = tl.dot(base, of_mask, x, input_precision=PRECISION)
    placed = (x + tl.load(position + place).to(tl.float32)).to(form)
    logits = tl.dot(key, placed, input_precision=PRECISION) + bias[:, None]
    return weights_of(logits, HEADS, SIZE, TILE).to(form), x


@triton.jit
def normal_of(x: tl.tensor, eps: tl.constexpr, CHANNELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Columns x [CHANNELS, TILE] with mean 0 and variance 1, and the factor of each."""
    x = x - tl.sum(x, 0)[None, :] / CHANNELS
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / CHANNELS + eps)[None, :]
    return x * factor, factor


@triton.jit(do_not_specialize=["masks"])
def image_to_tokens_forward(
    image: tl.tensor, position: tl.tensor, features: tl.tensor, basis: tl.tensor, keys: tl.tensor,
    biases: tl.tensor, values: tl.tensor, gains: tl.tensor, shifts: tl.tensor, out: tl.tensor,
    masks: tl.tensor, eps: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Write STEPS tiles of out; of the SIZE tokens of a head, those with a bias of -inf are padding."""
    mask = (tl.program_id(0) // (N // (TILE * STEPS))).to(tl.int64)
    first = (tl.program_id(0) % (N // (TILE * STEPS))) * (TILE * STEPS)
    channel, row = tl.arange(0, CHANNELS), tl.arange(0, HEADS * SIZE)
    of_row = mask * (HEADS * SIZE * CHANNELS) + row[:, None] * CHANNELS + channel
    if STEPS > 1:  # they stay in shared memory
        key, value = tl.load(keys + of_row), tl.load(values + of_row)
    bias = tl.load(biases + mask * (HEADS * SIZE) + row).to(tl.float32)
    image += (mask // masks) * (N * CHANNELS)
    for step in tl.range(STEPS):
        token = first + step * TILE + tl.arange(0, TILE)
        if STEPS == 1:
            key = tl.load(keys + of_row)
        weights, x = weights_and_tile(
            image, position, features, basis, key, bias, mask, token, PRECISION, RANK, HEADS, SIZE, N,
            CHANNELS, TILE,
        )  # fmt: skip
        if STEPS == 1:
            value = tl.load(values + of_row)
        x = tl.dot(tl.trans(value), weights, x, input_precision=PRECISION)
        x, _ = normal_of(x, eps, CHANNELS)
        x = x * tl.load(gains + channel).to(tl.float32)[:, None]
        x += tl.load(shifts + channel).to(tl.float32)[:, None]
        place = mask * (N * CHANNELS) + token[:, None] * CHANNELS + channel
        tl.store(out + place, tl.trans(x.to(image.dtype.element_ty)))


@triton.jit(do_not_specialize=["masks"])
def image_to_tokens_backward(
    image: tl.tensor, position: tl.tensor, features: tl.tensor, basis: tl.tensor, keys: tl.tensor,
    biases: tl.tensor, values: tl.tensor, gains: tl.tensor, gradient: tl.tensor, of_x: tl.tensor,
    of_sum: tl.tensor, of_norm: tl.tensor, masks: tl.tensor, eps: tl.constexpr, PRECISION: tl.constexpr,
    RANK: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of x and of the sum before the norm for STEPS tiles, and their sums for gain and
    shift of the norm.
    """
    form = image.dtype.element_ty
    mask = (tl.program_id(0) // (N // (TILE * STEPS))).to(tl.int64)
    first = (tl.program_id(0) % (N // (TILE * STEPS))) * (TILE * STEPS)
    channel, row = tl.arange(0, CHANNELS), tl.arange(0, HEADS * SIZE)
    of_row = mask * (HEADS * SIZE * CHANNELS) + row[:, None] * CHANNELS + channel
    if STEPS > 1:  # they stay in shared memory
        key, value = tl.load(keys + of_row), tl.load(values + of_row)
    bias, gain = tl.load(biases + mask * (HEADS * SIZE) + row).to(tl.float32), tl.load(gains + channel)
    of_gain, of_shift = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    image += (mask // masks) * (N * CHANNELS)
    for step in tl.range(STEPS):
        token = first + step * TILE + tl.arange(0, TILE)
        if STEPS == 1:
            key = tl.load(keys + of_row)
        weights, x = weights_and_tile(
            image, position, features, basis, key, bias, mask, token, PRECISION, RANK, HEADS, SIZE, N,
            CHANNELS, TILE,
        )  # fmt: skip
        if STEPS == 1:
            value = tl.load(values + of_row)
        x = tl.dot(tl.trans(value), weights, x, input_precision=PRECISION)
        normal, factor = normal_of(x, eps, CHANNELS)
        place = mask * (N * CHANNELS) + token[:, None] * CHANNELS + channel
        slope = tl.trans(tl.load(gradient + place)).to(tl.float32)
        of_gain += tl.sum(slope * normal, 1)
        of_shift += tl.sum(slope, 1)
        slope = slope * gain.to(tl.float32)[:, None]
        along = tl.sum(slope * normal, 0)[None, :] / CHANNELS
        slope = ((slope - tl.sum(slope, 0)[None, :] / CHANNELS - normal * along) * factor).to(form)
        tl.store(of_sum + place, tl.trans(slope))
        steep = tl.dot(value, slope, input_precision=PRECISION)
        steep = slope_of(weights.to(tl.float32), steep, HEADS, SIZE, TILE).to(form)
        if STEPS == 1:  # loaded again, in place of the values
            key = tl.load(keys + of_row)
        total = tl.dot(tl.trans(key), steep, slope.to(tl.float32), input_precision=PRECISION)
        tl.store(of_x + place, tl.trans(total.to(form)))
    sums = of_norm + tl.program_id(0).to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(sums, of_gain)
    tl.store(sums + CHANNELS, of_shift)


@triton.jit
def sums_of_rows(
    image: tl.tensor, placed: tl.tensor, features: tl.tensor, keys: tl.tensor, low: tl.tensor,
    biases: tl.tensor, values: tl.tensor, of_sum: tl.tensor, out: tl.tensor, out_low: tl.tensor,
    of_biases: tl.tensor, masks: tl.tensor, program: tl.tensor, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the summands of STEPS tiles of the gradients of HEADS heads: with KEYS those of keys and biases,
    else those of values. `low`: keys basis'.
    """
    ROWS: tl.constexpr = HEADS * SIZE
    parts = N // (TILE * STEPS)
    block, part, mask = program % BLOCKS, program // BLOCKS % parts, program // (BLOCKS * parts)
    index, channel, rank = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, 16)
    row = (mask * BLOCKS + block) * ROWS + index
    key, bias = tl.load(keys + row[:, None] * CHANNELS + channel), tl.load(biases + row).to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if RANK > 0:
        key_low = tl.load(low + row[:, None] * RANK + rank)
    if KEYS:
        value = tl.load(values + row[:, None] * CHANNELS + channel)
        of_bias = tl.zeros((ROWS,), tl.float32)
        if RANK > 0:
            total_low = tl.zeros((ROWS, RANK), tl.float32)
    for step in tl.range(STEPS):
        token = (part * STEPS + step) * TILE + tl.arange(0, TILE)
        place = token[:, None] * CHANNELS + channel
        if SHARED:
            at = tl.load(placed + mask // masks * (N * CHANNELS) + place)
        else:
            x = tl.load(image + mask * (N * CHANNELS) + place)
            at = (x.to(tl.float32) + tl.load(placed + place).to(tl.float32)).to(x.dtype)
        logits = tl.dot(key, tl.trans(at), input_precision=PRECISION) + bias[:, None]
        if RANK > 0:
            feature = tl.load(features + mask * (RANK * N) + rank[:, None] * N + token)
            logits = tl.dot(key_low, feature, logits, input_precision=PRECISION)
        weights = weights_of(logits, HEADS, SIZE, TILE)
        slope = tl.load(of_sum + mask * (N * CHANNELS) + place)
        if KEYS:
            steep = tl.dot(value, tl.trans(slope), input_precision=PRECISION)
            steep = slope_of(weights, steep, HEADS, SIZE, TILE)
            of_bias += tl.sum(steep, 1)
            half = steep.to(at.dtype)
            total = tl.dot(half, at, total, input_precision=PRECISION)
            if RANK > 0:
                total_low = tl.dot(half, tl.trans(feature), total_low, input_precision=PRECISION)
        else:
            total = tl.dot(weights.to(at.dtype), slope, total, input_precision=PRECISION)
    row = ((mask * parts + part) * BLOCKS + block) * ROWS + index
    form = out.dtype.element_ty
    tl.store(out + row[:, None] * CHANNELS + channel, total.to(form))
    if KEYS:
        tl.store(of_biases + row, of_bias.to(form))
        if RANK > 0:
            tl.store(out_low + row[:, None] * RANK + rank, total_low.to(form))


@triton.jit(do_not_specialize=["masks"])
def image_to_tokens_rows(
    image: tl.tensor, placed: tl.tensor, features: tl.tensor, keys: tl.tensor, low: tl.tensor,
    biases: tl.tensor, values: tl.tensor, of_sum: tl.tensor, of_keys: tl.tensor, of_low: tl.tensor,
    of_biases: tl.tensor, of_values: tl.tensor, masks: tl.tensor, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """See `sums_of_rows`; the sums of keys and those of values, which do not fit in the registers of one
    program, in two that read the same tiles.
    """
    program = tl.program_id(0).to(tl.int64)
    if program % 2 == 0:
        sums_of_rows(
            image, placed, features, keys, low, biases, values, of_sum, of_keys, of_low, of_biases, masks,
            program // 2, True, PRECISION, SHARED, RANK, BLOCKS, HEADS, SIZE, N, CHANNELS, TILE, STEPS,
        )  # fmt: skip
    else:
        sums_of_rows(
            image, placed, features, keys, low, biases, values, of_sum, of_values, of_low, of_biases, masks,
            program // 2, False, PRECISION, SHARED, RANK, BLOCKS, HEADS, SIZE, N, CHANNELS, TILE, STEPS,
        )  # fmt: skip


class TokensOfMasks(torch.autograd.Function):
    """Tokens [B, N, C] of images as those of their masks, [B, K, N, C], where ReadImage cannot be used.

    The gradient of the result is that of x = tokens + features' basis; see ImageToTokens.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, features: Tensor | None, basis: Tensor | None, masks: int
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(features, basis)
        return tokens[:, None].expand(-1, masks, -1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, basis = ctx.saved_tensors
        if features is None:
            return gradient.sum(1), None, None, None
        of_x = gradient.flatten(0, 1)
        of_basis = torch.bmm(features, of_x).sum(0, dtype=torch.float32).to(basis.dtype)
        return gradient.sum(1), torch.matmul(basis, of_x.transpose(1, 2)), of_basis, None


class ImageToTokens(torch.autograd.Function):
    """See the module. Returns out, [M, N, C] in the number format of `image`.

    image [B, K, N, C], of which the K masks of an image share the tokens; its gradient is that of x. x is
    image + features' basis with features [M, 16, N] and basis [16, C], or None for both; these have no
    gradient here (see ReadImage and TokensOfMasks). position [N, C] and `placed`, of a shared image: its
    tokens + position [B, N, C], have none either; keys and values [M, H, T, C]; biases [M, H, T]; gains and
    shifts of the norm [C]. N must be a multiple of the tiles, C and H powers of two.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, placed: Tensor | None, features: Tensor | None, basis: Tensor | None,
        position: Tensor, keys: Tensor, biases: Tensor, values: Tensor, gains: Tensor, shifts: Tensor,
        eps: float,
    ) -> Tensor:  # fmt: skip
        (count, heads, real, channels), (masks, tokens) = keys.shape, image.shape[1:3]
        size = MOST_TOKENS  # fewer need as much time in products, and more registers
        keys, values = padded(keys, size), padded(values, size)
        biases = F.pad(biases, (0, size - real), value=float("-inf")).contiguous()
        shared, position = image[:, 0].contiguous(), position.contiguous()
        placed = None if placed is None else placed.contiguous()
        of_mask, base, rank = shared, shared, 0
        if features is not None and basis is not None:
            of_mask, base, rank = features.contiguous(), basis.contiguous(), len(basis)
        out = image.new_empty(count, tokens, channels)
        if count:
            tile, steps, warps, stages = places_for(shared)[0]
            image_to_tokens_forward[(count * (tokens // (tile * steps)),)](
                shared, position, of_mask, base, keys, biases, values, gains, shifts, out, masks, eps,
                precision_of(image), rank, heads, size, tokens, channels, tile, steps, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
        ctx.save_for_backward(shared, placed, position, of_mask, base, keys, biases, values, gains)
        ctx.masks, ctx.rank, ctx.real, ctx.eps = masks, rank, real, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shared, placed, position, features, basis, keys, biases, values, gains = ctx.saved_tensors
        (count, heads, size, channels), tokens = keys.shape, shared.shape[1]
        of_x, of_sum = (shared.new_empty(count, tokens, channels) for _ in range(2))
        _, (tile, steps, warps, stages), places_of_rows = places_for(shared)
        programs = count * (tokens // (tile * steps))
        of_norm = shared.new_empty((programs, 2, channels), dtype=torch.float32)
        if count:
            image_to_tokens_backward[(programs,)](
                shared, position, features, basis, keys, biases, values, gains, gradient.contiguous(), of_x,
                of_sum, of_norm, ctx.masks, ctx.eps, precision_of(shared), ctx.rank, heads, size, tokens,
                channels, tile, steps, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        tile, steps, warps, stages = places_of_rows
        parts, large = tokens // (tile * steps), shared_memory(shared.device) >= MEMORY
        blocks = 1 if large else min(2, heads)
        warps = min(warps, max(4, heads * size // 16)) if large else warps  # a warp has 16 rows
        sizes, kind = (count, parts, heads, size), torch.float32 if parts > 1 else shared.dtype
        of_keys, of_low, of_values = (
            shared.new_empty((*sizes, x), dtype=kind) for x in (channels, ctx.rank, channels)
        )
        of_biases = shared.new_empty(sizes, dtype=kind)
        low = keys if not ctx.rank else keys @ basis.T
        if count:
            image_to_tokens_rows[(2 * count * parts * blocks,)](
                shared, position if placed is None else placed, features, keys, low, biases, values, of_sum,
                of_keys, of_low, of_biases, of_values, ctx.masks, precision_of(shared), placed is not None,
                ctx.rank, blocks, heads // blocks, size, tokens, channels, tile, steps, num_warps=warps,
                num_stages=1 if ctx.rank else stages,  # with features, two are too large for a B200
            )  # fmt: skip
        of_keys, of_low, of_biases, of_values = (
            summed(x)[:, :, : ctx.real].to(shared.dtype) for x in (of_keys, of_low, of_biases, of_values)
        )
        if ctx.rank:
            of_keys = of_keys + of_low @ basis
        of_gains, of_shifts = of_norm.sum(0).to(gains.dtype)
        of_image = of_x.view(len(shared), ctx.masks, tokens, channels)
        return of_image, *[None] * 4, of_keys, of_biases, of_values, of_gains, of_shifts, None
