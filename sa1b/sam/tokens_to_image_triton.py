"""The attention of tokens to the image tokens of their mask on a CUDA device, as a Triton kernel.

x are the N image tokens of C channels of a mask and p their positions; q are R rows, the queries of all heads
with the projection of the keys applied to them (see sa1b.sam.transformer):

    read = softmax of q (x + p)' over the N image tokens, times x

A program computes the rows of a mask for a part of the image tokens, tile by tile. It reads each tile once,
as keys and as values, and stores no logits: the softmax is that of the tiles so far. The backward pass
computes them again from the maximum and the sum of each row. It adds its gradient of x to the one that x has
from its other uses, so that they are not added afterwards. All sums are in float32 and in a fixed order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sa1b.sam.norm_triton import MOST_CHANNELS, precision_of

MOST_ROWS = 32  # with 64 rows, the registers of a program hold 72 to 640 bytes too little (sm_90)
PROGRAMS = 8 * 132  # several rounds on an H100; with fewer masks, several programs share a mask


class Places(NamedTuple):
    """Image tokens of a tile, warps of a program, stages of loads."""

    tile: int
    warps: int
    stages: int


FORWARD_PLACES = Places(64, 8, 2)
BACKWARD_PLACES = Places(32, 8, 2)


def fits(tokens: int, channels: int, rows: int) -> bool:
    """Whether the kernels support N image tokens of C channels and R rows."""
    whole = all(tokens % places.tile == 0 for places in (FORWARD_PLACES, BACKWARD_PLACES))
    power = channels & (channels - 1) == 0 and 16 <= channels <= MOST_CHANNELS
    return whole and power and rows <= MOST_ROWS


@triton.jit
def read_forward(
    rows: tl.tensor, image: tl.tensor, position: tl.tensor, out: tl.tensor, logs: tl.tensor,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write what the rows of a mask read from a part of its image tokens, and the logarithm of its weight."""
    form = image.dtype.element_ty
    mask = (tl.program_id(0) // PARTS).to(tl.int64)
    first = (tl.program_id(0) % PARTS) * (N // PARTS)
    row, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    query = tl.load(rows + mask * (ROWS * CHANNELS) + row[:, None] * CHANNELS + channel)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in tl.range(first, first + N // PARTS, TILE):
        place = (start + tl.arange(0, TILE))[:, None] * CHANNELS + channel
        x = tl.load(image + mask * (N * CHANNELS) + place)
        placed = (x.to(tl.float32) + tl.load(position + place).to(tl.float32)).to(form)
        logits = tl.dot(query, tl.trans(placed), input_precision=PRECISION)
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        kept = tl.exp(highest - higher)
        total = total * kept + tl.sum(weights, 1)
        read = read * kept[:, None] + tl.dot(weights.to(form), x, input_precision=PRECISION)
        highest = higher
    part = tl.program_id(0).to(tl.int64) * ROWS
    place = (part + row)[:, None] * CHANNELS + channel
    tl.store(out + place, (read / total[:, None]).to(out.dtype.element_ty))
    tl.store(logs + part + row, highest + tl.log(total))


@triton.jit
def read_backward(
    rows: tl.tensor, image: tl.tensor, position: tl.tensor, gradient: tl.tensor, logs: tl.tensor,
    along: tl.tensor, other: tl.tensor, of_image: tl.tensor, of_rows: tl.tensor, OTHER: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a part of the image tokens of a mask, and the part's summand of those of the
    rows. `other`: the gradient of the image tokens from their other uses.
    """
    form = image.dtype.element_ty
    mask = (tl.program_id(0) // PARTS).to(tl.int64)
    first = (tl.program_id(0) % PARTS) * (N // PARTS)
    row, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    at = mask * (ROWS * CHANNELS) + row[:, None] * CHANNELS + channel
    query, slope = tl.load(rows + at), tl.load(gradient + at)
    log, mean = tl.load(logs + mask * ROWS + row), tl.load(along + mask * ROWS + row)
    of_query = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in tl.range(first, first + N // PARTS, TILE):
        place = (start + tl.arange(0, TILE))[:, None] * CHANNELS + channel
        x = tl.load(image + mask * (N * CHANNELS) + place)
        placed = (x.to(tl.float32) + tl.load(position + place).to(tl.float32)).to(form)
        weights = tl.exp(tl.dot(query, tl.trans(placed), input_precision=PRECISION) - log[:, None])
        steep = tl.dot(slope, tl.trans(x), input_precision=PRECISION)
        steep = (weights * (steep - mean[:, None])).to(form)
        of_query += tl.dot(steep, placed, input_precision=PRECISION)
        of_x = tl.dot(tl.trans(weights.to(form)), slope, input_precision=PRECISION)
        of_x += tl.dot(tl.trans(steep), query, input_precision=PRECISION)
        if OTHER:
            of_x += tl.load(other + mask * (N * CHANNELS) + place).to(tl.float32)
        tl.store(of_image + mask * (N * CHANNELS) + place, of_x.to(form))
    part = tl.program_id(0).to(tl.int64) * ROWS
    tl.store(of_rows + (part + row)[:, None] * CHANNELS + channel, of_query)


class ReadImage(torch.autograd.Function):
    """See the module. Returns what is read, [M, R, C], and `image`, for its other uses.

    rows [M, R, C], image [M, N, C] and position [N, C], which has no gradient, in one number format. N must
    be a multiple of the tiles, C a power of two.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        count, real, channels = rows.shape
        size, tokens = max(16, triton.next_power_of_2(real)), image.shape[1]  # products need 16 rows
        given = F.pad(rows, (0, 0, 0, size - real)).contiguous()
        image, position = image.contiguous(), position.contiguous()
        parts = _parts(count, tokens, FORWARD_PLACES)
        kind = torch.float32 if parts > 1 else image.dtype
        out = image.new_empty((count, parts, size, channels), dtype=kind)
        logs = image.new_empty((count, parts, size), dtype=torch.float32)
        if count:
            tile, warps, stages = FORWARD_PLACES
            read_forward[(count * parts,)](
                given, image, position, out, logs, precision_of(image), size, tokens, channels, parts, tile,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        if parts > 1:
            log = logs.logsumexp(1, keepdim=True)
            out = (out * (logs - log).exp()[..., None]).sum(1).to(image.dtype)
            logs = log
        read, logs = out.view(count, size, channels)[:, :real], logs.view(count, size)
        ctx.save_for_backward(given, image, position, read, logs)
        return read, image

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, other: Tensor | None) -> tuple[Tensor | None, ...]:
        given, image, position, read, logs = ctx.saved_tensors
        (count, size, channels), real, tokens = given.shape, read.shape[1], image.shape[1]
        along = F.pad((gradient.float() * read.float()).sum(2), (0, size - real))
        gradient = F.pad(gradient, (0, 0, 0, size - real)).contiguous()
        parts = _parts(count, tokens, BACKWARD_PLACES)
        of_image = torch.empty_like(image)
        of_rows = image.new_empty((count, parts, size, channels), dtype=torch.float32)
        if count:
            tile, warps, stages = BACKWARD_PLACES
            read_backward[(count * parts,)](
                given, image, position, gradient, logs, along,
                image if other is None else other.contiguous(), of_image, of_rows, other is not None,
                precision_of(image), size, tokens, channels, parts, tile, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        return of_rows.sum(1)[:, :real].to(given.dtype), of_image, None


def _parts(masks: int, tokens: int, places: Places) -> int:
    """Programs that share a mask: a power of two, each with whole tiles."""
    parts = 1
    while masks * parts < PROGRAMS and tokens % (2 * parts * places.tile) == 0:
        parts *= 2
    return parts
