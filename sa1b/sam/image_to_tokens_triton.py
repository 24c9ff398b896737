"""The attention of image tokens to the tokens of their mask on a CUDA device, as Triton kernels.

With its residual and norm. x are the N image tokens of C channels of a mask, p their positions, and k, b, v
the keys, biases and values of H heads * T tokens, with the projections of the image applied to them (see
sa1b.sam.transformer):

    weights = softmax of k (x + p)' + b over the T tokens of each head
    out     = norm(x + weights' v)

A program computes a tile of image tokens. The forward pass reads x once and writes out and out + p; for the
backward pass it keeps the weights and the sum before the norm. The backward pass reads these and the two
gradients, and writes the gradients of x, of the sum and of the logits; matrix products of torch follow. All
sums are in float32 and in a fixed order.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sa1b.sam.norm_triton import MOST_CHANNELS, precision_of, standard

MOST_TOKENS = 16
RANK = 16  # of the features of a mask, where it has some


class Places(NamedTuple):
    """How programs divide the image tokens: tokens of a tile, tiles of a program, warps, stages of loads."""

    tile: int
    steps: int
    warps: int
    stages: int

    def steps_of(self, tokens: int) -> int:
        """Tiles of a program for this number of image tokens."""
        return gcd(tokens // self.tile, self.steps)


FORWARD_PLACES = Places(64, 1, 8, 3)
BACKWARD_PLACES = Places(64, 1, 8, 3)


def fits(tokens: int, heads: int, keys: int, channels: int) -> bool:
    """Whether the kernels support N image tokens, H heads of T tokens and C channels."""
    powers = all(x & (x - 1) == 0 for x in (heads, channels))
    whole = all(tokens % x.tile == 0 for x in (FORWARD_PLACES, BACKWARD_PLACES))
    return powers and whole and keys <= MOST_TOKENS and 16 <= channels <= MOST_CHANNELS


@triton.jit(do_not_specialize=["masks_of_image", "real"])
def image_to_tokens_forward(
    image: tl.tensor, position: tl.tensor, features: tl.tensor, basis: tl.tensor, keys: tl.tensor,
    biases: tl.tensor, values: tl.tensor, gains: tl.tensor, shifts: tl.tensor, out: tl.tensor,
    out_placed: tl.tensor, before: tl.tensor, kept: tl.tensor, masks_of_image: tl.tensor, real: tl.tensor,
    eps: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, PLACED: tl.constexpr,
) -> None:  # fmt: skip
    """Write STEPS tiles of out, with PLACED of out + p, the sum before the norm and the weights, which are 0
    for padding: of SIZE tokens of a head, the first `real` ones are tokens.
    """
    form = image.dtype.element_ty
    mask = (tl.program_id(0) // (N // (TILE * STEPS))).to(tl.int64)
    first = (tl.program_id(0) % (N // (TILE * STEPS))) * (TILE * STEPS)
    channel, row = tl.arange(0, CHANNELS), tl.arange(0, HEADS * SIZE)
    of_row = mask * (HEADS * SIZE * CHANNELS) + row[:, None] * CHANNELS + channel
    if STEPS > 1:  # they stay in shared memory
        key, value = tl.load(keys + of_row), tl.load(values + of_row)
    image += (mask // masks_of_image) * (N * CHANNELS)
    for step in tl.range(STEPS):
        token = first + step * TILE + tl.arange(0, TILE)
        place = token[:, None] * CHANNELS + channel
        x = tl.load(image + place).to(tl.float32)
        if RANK > 0:
            rank = tl.arange(0, RANK)
            of_mask = tl.load(features + mask * (RANK * N) + rank[None, :] * N + token[:, None])
            x += tl.dot(
                of_mask, tl.load(basis + rank[:, None] * CHANNELS + channel), input_precision=PRECISION
            )
        placed = (x + tl.load(position + place).to(tl.float32)).to(form)
        if STEPS == 1:
            key = tl.load(keys + of_row)
        logits = tl.dot(key, tl.trans(placed), input_precision=PRECISION)
        logits += tl.load(biases + mask * (HEADS * SIZE) + row).to(tl.float32)[:, None]
        logits = tl.reshape(logits, (HEADS, SIZE, TILE))
        logits = tl.where((tl.arange(0, SIZE) < real)[None, :, None], logits, float("-inf"))
        weights = tl.exp(logits - tl.max(logits, 1)[:, None, :])
        weights = tl.reshape(weights / tl.sum(weights, 1)[:, None, :], (HEADS * SIZE, TILE)).to(form)
        tl.store(kept + mask * (HEADS * SIZE * N) + row[:, None] * N + token[None, :], weights)
        if STEPS == 1:
            value = tl.load(values + of_row)
        x += tl.dot(tl.trans(weights), value, input_precision=PRECISION)
        place += mask * (N * CHANNELS)
        tl.store(before + place, x.to(form))
        x, _ = standard(x.to(form).to(tl.float32), eps, CHANNELS)
        x = x * tl.load(gains + channel).to(tl.float32) + tl.load(shifts + channel).to(tl.float32)
        tl.store(out + place, x.to(form))
        if PLACED:
            x += tl.load(position + token[:, None] * CHANNELS + channel).to(tl.float32)
            tl.store(out_placed + place, x.to(form))


@triton.jit
def image_to_tokens_backward(
    keys: tl.tensor, values: tl.tensor, gains: tl.tensor, before: tl.tensor, kept: tl.tensor,
    gradient: tl.tensor, gradient_placed: tl.tensor, of_x: tl.tensor, of_sum: tl.tensor, of_logits: tl.tensor,
    of_biases: tl.tensor, of_norm: tl.tensor, eps: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of x, of the sum before the norm and of the logits for STEPS tiles, and their sums
    for the biases, and for gain and shift of the norm.
    """
    form = before.dtype.element_ty
    mask = (tl.program_id(0) // (N // (TILE * STEPS))).to(tl.int64)
    first = (tl.program_id(0) % (N // (TILE * STEPS))) * (TILE * STEPS)
    channel, row = tl.arange(0, CHANNELS), tl.arange(0, HEADS * SIZE)
    of_row = mask * (HEADS * SIZE * CHANNELS) + row[:, None] * CHANNELS + channel
    if STEPS > 1:  # they stay in shared memory
        key, value = tl.load(keys + of_row), tl.load(values + of_row)
    of_gain, of_shift = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    of_bias = tl.zeros((HEADS * SIZE,), tl.float32)
    for step in tl.range(STEPS):
        token = first + step * TILE + tl.arange(0, TILE)
        place = mask * (N * CHANNELS) + token[:, None] * CHANNELS + channel
        normal, factor = standard(tl.load(before + place).to(tl.float32), eps, CHANNELS)
        slope = tl.load(gradient + place).to(tl.float32)
        if PLACED:
            slope += tl.load(gradient_placed + place).to(tl.float32)
        of_gain += tl.sum(slope * normal, 0)
        of_shift += tl.sum(slope, 0)
        slope = slope * tl.load(gains + channel).to(tl.float32)
        along = tl.sum(slope * normal, 1)[:, None] / CHANNELS
        slope = ((slope - tl.sum(slope, 1)[:, None] / CHANNELS - normal * along) * factor).to(form)
        tl.store(of_sum + place, slope)
        if STEPS == 1:
            value = tl.load(values + of_row)
        steep = tl.dot(value, tl.trans(slope), input_precision=PRECISION)
        at = mask * (HEADS * SIZE * N) + row[:, None] * N + token[None, :]
        weights = tl.reshape(tl.load(kept + at).to(tl.float32), (HEADS, SIZE, TILE))
        steep = tl.reshape(steep, (HEADS, SIZE, TILE)) * weights
        steep = tl.reshape(steep - weights * tl.sum(steep, 1)[:, None, :], (HEADS * SIZE, TILE))
        of_bias += tl.sum(steep, 1)
        steep_half = steep.to(form)
        tl.store(of_logits + at, steep_half)
        if STEPS == 1:
            key = tl.load(keys + of_row)
        total = tl.dot(tl.trans(steep_half), key, input_precision=PRECISION)
        tl.store(of_x + place, (total + slope.to(tl.float32)).to(form))
    sums = of_norm + tl.program_id(0).to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(sums, of_gain)
    tl.store(sums + CHANNELS, of_shift)
    tl.store(of_biases + tl.program_id(0).to(tl.int64) * (HEADS * SIZE) + row, of_bias)


class ImageToTokens(torch.autograd.Function):
    """See the module. Returns out and, if `both`, out + p, [M, N, C] in the number format of `image`.

    image [B, N, C], the masks of an image being neighbours and as many for each; `placed`, image + position,
    for the backward pass; x is image + features' basis with features [M, R, N] and basis [R, C], or None for
    both. position [N, C]; keys and values [M, H, T, C]; biases [M, H, T]; gains and shifts of the norm [C]. N
    must be a multiple of the tiles, C and H powers of two.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, placed: Tensor, features: Tensor | None, basis: Tensor | None,
        position: Tensor, keys: Tensor, biases: Tensor, values: Tensor, gains: Tensor, shifts: Tensor,
        eps: float, both: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        (count, heads, real, channels), (images, tokens, _) = keys.shape, image.shape
        size = max(8, 16 // heads, triton.next_power_of_2(real))  # products need 16 rows
        keys, values = (F.pad(x, (0, 0, 0, size - real)).contiguous() for x in (keys, values))
        biases = F.pad(biases, (0, size - real)).contiguous()
        low = () if features is None or basis is None else (features.contiguous(), basis.contiguous())
        image, position = image.contiguous(), position.contiguous()
        out, before = (image.new_empty(count, tokens, channels) for _ in range(2))
        out_placed = torch.empty_like(out) if both else None
        kept = image.new_empty(count, heads * size, tokens)
        if count:
            places = FORWARD_PLACES
            steps = places.steps_of(tokens)
            second = out if out_placed is None else out_placed
            image_to_tokens_forward[(count * (tokens // (places.tile * steps)),)](
                image, position, *(low or (image, image)), keys, biases, values, gains, shifts, out, second,
                before, kept, count // images, real, eps, precision_of(image), len(low[1]) if low else 0,
                heads, size, tokens, channels, places.tile, steps, both, num_warps=places.warps,
                num_stages=places.stages,
            )  # fmt: skip
        ctx.save_for_backward(image, placed, keys, values, gains, before, kept, *low)
        ctx.real, ctx.eps = real, eps
        return out, out_placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_placed: Tensor | None) -> tuple[Tensor | None, ...]:
        image, placed, keys, values, gains, before, kept, *low = ctx.saved_tensors
        (count, heads, size, channels), (images, tokens, _) = keys.shape, image.shape
        of_x, of_sum, of_logits = torch.empty_like(before), torch.empty_like(before), torch.empty_like(kept)
        places = BACKWARD_PLACES
        steps = places.steps_of(tokens)
        programs = tokens // (places.tile * steps)  # of a mask
        of_biases = torch.empty((count, programs, heads * size), device=image.device)
        of_norm = torch.empty((count * programs, 2, channels), device=image.device)
        if count:
            second = gradient if of_placed is None else of_placed
            image_to_tokens_backward[(count * programs,)](
                keys, values, gains, before, kept, gradient.contiguous(), second.contiguous(), of_x, of_sum,
                of_logits, of_biases, of_norm, ctx.eps, precision_of(image), heads, size, tokens, channels,
                places.tile, steps, of_placed is not None, num_warps=places.warps, num_stages=places.stages,
            )  # fmt: skip
        grouped = of_logits.view(images, -1, tokens)  # the rows of all masks of an image
        of_keys = torch.bmm(grouped, placed).view(count, -1, channels)
        of_image, of_features, of_basis = of_x, None, None
        if low:
            features, basis = low
            of_keys = of_keys + torch.bmm(of_logits, features.transpose(1, 2)) @ basis
            of_features = torch.matmul(basis, of_x.transpose(1, 2))
            of_basis = torch.bmm(features, of_x).sum(0, dtype=torch.float32).to(basis.dtype)
        if images != count:
            of_image = of_x.view(images, -1, tokens, channels).sum(1)
        of_gains, of_shifts = of_norm.sum(0).to(gains.dtype)
        split, of_values = (count, heads, size, -1), torch.bmm(kept, of_sum)
        of_keys, of_values = (x.view(split)[:, :, : ctx.real] for x in (of_keys, of_values))
        of_biases = of_biases.sum(1).view(split)[:, :, : ctx.real, 0].to(image.dtype)
        return (
            of_image, None, of_features, of_basis, None, of_keys, of_biases, of_values, of_gains, of_shifts,
            None, None,
        )  # fmt: skip
