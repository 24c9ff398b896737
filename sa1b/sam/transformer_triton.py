"""The transformer on a CUDA device: Triton kernels of layer norms, and of the attention of image tokens.

For layer norms of many rows of few channels, with GELU after them, torch starts a block of 128 threads for
each row, which for 4 to 256 channels takes 3 to 50 times as long as the bytes need. Here a program takes many
rows. It reads the input and writes the output once, and computes in float32. The backward pass keeps only the
input and computes mean and deviation again. Each of its programs takes every n-th tile, adds up the gradients
of weight and bias in registers, number by number, and sums over the rows of a tile once at its end. torch
adds the sums of the programs, so the order of the sums is fixed.

In the attention of image tokens to tokens, with its residual and norm, x are the N image tokens of C channels
of a mask, p their positions, and k, b, v the keys, biases and values of H heads * T tokens, with the
projections of the image applied to them (see sa1b.sam.transformer):

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
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the model on a CUDA device needs triton: pip install 'sa1b[kernels]'") from error

MOST_CHANNELS = 256  # a power of two, as numbers of channels must be


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


def precision_of(x: Tensor) -> str:
    """Of products of float32 numbers; others are exact before their sums."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
