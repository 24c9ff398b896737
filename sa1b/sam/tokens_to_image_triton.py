"""The attention of tokens to the image tokens of their mask on a CUDA device, as Triton kernels.

x are the N image tokens of C channels of a mask and p their positions; q are R rows, the queries of all heads
with the projection of the keys applied to them (see sa1b.sam.transformer):

    read = softmax of q (x + p)' over the N image tokens, times x

In the first layer the masks of an image share its tokens, and x is their sum with features' basis, of rank r,
for each mask. It is never stored:

    q (x + p)' = q (image + p)' + (q basis') features
    weights x  = weights image + (weights features') basis

Tiles of image tokens are read as keys and as values, and no logits are stored: the softmax is that of the
tiles so far. The backward pass computes them again, and the weights from the logarithm of their sum in each
row. It needs them for the gradients of x and of the rows, which one kernel computes where the rows are few
and no masks share x. The gradient of x is added to the one that x has from its other uses, and for a shared
image it is summed over the masks, so that no torch operator reads it again. All sums are in float32 and in a
fixed order.

A program has all rows, so that it reads a tile once. Tensor cores of an H100 take 64 rows of a product.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sa1b.sam.norm_triton import MEMORY, MOST_CHANNELS, padded, precision_of, products, shared_memory, summed

MOST_ROWS = 128
FEW_ROWS = 32  # one kernel computes the gradients of up to so many rows and of the image tokens
BLOCK = 32  # rows that are computed at a time for the gradient of a shared image
PROGRAMS = 2 * 132  # two rounds on an H100; with fewer masks, several programs share a mask
SHARED_PROGRAMS = 2 * 132  # of a shared image: with fewer tiles, several programs share its masks


class Places(NamedTuple):
    """Image tokens of a tile, warps of a program, stages of loads."""

    tile: int
    warps: int
    stages: int


# By the number of rows, a power of two. A warp has 16 rows of 64 or 128. For OWN's tiles see image_to_tokens.
_FEW = Places(64, 8, 2)
FORWARD_PLACES = {16: _FEW, 32: _FEW, 64: Places(32, 4, 2), 128: Places(64, 8, 2)}
ROWS_PLACES = {16: Places(32, 8, 2), 32: Places(32, 8, 2), 64: Places(32, 4, 2), 128: Places(32, 8, 2)}
OWN_PLACES = {16: Places(32, 8, 2), 32: Places(32, 8, 2), 64: Places(64, 8, 2), 128: Places(64, 8, 1)}
SHARED_PLACES = Places(64, 8, 1)
LARGEST_TILE = 64


def fits(image: Tensor, rows: int, *, shared: bool) -> bool:
    """Whether the kernels support R rows for image tokens [..., N, C], which masks may share."""
    tokens, channels = image.shape[-2:]
    power = channels & (channels - 1) == 0 and 16 <= channels <= MOST_CHANNELS
    large = shared or rows > FEW_ROWS
    memory = not large or shared_memory(image.device) >= MEMORY
    return tokens % LARGEST_TILE == 0 and power and rows <= MOST_ROWS and memory


@triton.jit
def keys_of(
    x: tl.tensor, placed: tl.tensor, place: tl.tensor, image: tl.tensor, N: tl.constexpr,
    CHANNELS: tl.constexpr, SHARED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Image tokens plus their positions: stored for each image, or computed from the positions."""
    if SHARED:
        return tl.load(placed + image * (N * CHANNELS) + place)
    return (x.to(tl.float32) + tl.load(placed + place).to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["masks"])
def read_forward(
    rows: tl.tensor, low: tl.tensor, image: tl.tensor, placed: tl.tensor, features: tl.tensor, out: tl.tensor,
    out_low: tl.tensor, logs: tl.tensor, masks: tl.tensor, PRECISION: tl.constexpr, SHARED: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write what the rows of a mask read from every n-th tile of its image tokens, and the logarithm of their
    weight.
    """
    form = image.dtype.element_ty
    mask = tl.program_id(0).to(tl.int64)
    program = mask * tl.num_programs(1) + tl.program_id(1)
    index, channel, rank = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, 16)
    row = mask * ROWS + index
    query = tl.load(rows + row[:, None] * CHANNELS + channel)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS, CHANNELS), tl.float32)
    if RANK > 0:
        query_low = tl.load(low + row[:, None] * RANK + rank)
        read_low = tl.zeros((ROWS, RANK), tl.float32)
    for start in tl.range(tl.program_id(1) * TILE, N, tl.num_programs(1) * TILE):
        token = start + tl.arange(0, TILE)
        place = token[:, None] * CHANNELS + channel
        x = tl.load(image + mask // masks * (N * CHANNELS) + place)
        key = keys_of(x, placed, place, mask // masks, N, CHANNELS, SHARED)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if RANK > 0:
            feature = tl.load(features + mask * (RANK * N) + rank[:, None] * N + token)
            logits = tl.dot(query_low, feature, logits, input_precision=PRECISION)
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        kept = tl.exp(highest - higher)
        total = total * kept + tl.sum(weights, 1)
        half = weights.to(form)
        read = tl.dot(half, x, read * kept[:, None], input_precision=PRECISION)
        if RANK > 0:
            read_low = tl.dot(half, tl.trans(feature), read_low * kept[:, None], input_precision=PRECISION)
        highest = higher
    row = program * ROWS + index
    tl.store(out + row[:, None] * CHANNELS + channel, (read / total[:, None]).to(out.dtype.element_ty))
    if RANK > 0:
        read_low = (read_low / total[:, None]).to(out_low.dtype.element_ty)
        tl.store(out_low + row[:, None] * RANK + rank, read_low)
    tl.store(logs + row, highest + tl.log(total))


@triton.jit
def slopes(
    query: tl.tensor, slope: tl.tensor, x: tl.tensor, key: tl.tensor, logits: tl.tensor, steep: tl.tensor,
    log: tl.tensor, mean: tl.tensor, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The weights [ROWS, TILE] of a tile, and the gradient of its logits; `logits`, `steep`: summands."""
    logits = tl.dot(query, tl.trans(key), logits, input_precision=PRECISION)
    weights = tl.exp(logits - log[:, None])
    steep = tl.dot(slope, tl.trans(x), steep, input_precision=PRECISION)
    return weights.to(x.dtype), (weights * (steep - mean[:, None])).to(x.dtype)


@triton.jit(do_not_specialize=["masks"])
def read_of_rows(
    rows: tl.tensor, low: tl.tensor, image: tl.tensor, placed: tl.tensor, features: tl.tensor,
    gradient: tl.tensor, gradient_low: tl.tensor, logs: tl.tensor, along: tl.tensor, of_rows: tl.tensor,
    of_low: tl.tensor, masks: tl.tensor, PRECISION: tl.constexpr, SHARED: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the summand of every n-th tile of the gradients of the rows of a mask."""
    mask = tl.program_id(0).to(tl.int64)
    program = mask * tl.num_programs(1) + tl.program_id(1)
    index, channel, rank = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, 16)
    row = mask * ROWS + index
    query = tl.load(rows + row[:, None] * CHANNELS + channel)
    slope = tl.load(gradient + row[:, None] * CHANNELS + channel)
    log, mean = tl.load(logs + row), tl.load(along + row)
    of_query = tl.zeros((ROWS, CHANNELS), tl.float32)
    if RANK > 0:
        query_low = tl.load(low + row[:, None] * RANK + rank)
        slope_low = tl.load(gradient_low + row[:, None] * RANK + rank)
        of_query_low = tl.zeros((ROWS, RANK), tl.float32)
    for start in tl.range(tl.program_id(1) * TILE, N, tl.num_programs(1) * TILE):
        token = start + tl.arange(0, TILE)
        place = token[:, None] * CHANNELS + channel
        x = tl.load(image + mask // masks * (N * CHANNELS) + place)
        key = keys_of(x, placed, place, mask // masks, N, CHANNELS, SHARED)
        logits, steep = tl.zeros((ROWS, TILE), tl.float32), tl.zeros((ROWS, TILE), tl.float32)
        if RANK > 0:
            feature = tl.load(features + mask * (RANK * N) + rank[:, None] * N + token)
            logits = tl.dot(query_low, feature, logits, input_precision=PRECISION)
            steep = tl.dot(slope_low, feature, steep, input_precision=PRECISION)
        _, steep = slopes(query, slope, x, key, logits, steep, log, mean, PRECISION)
        of_query = tl.dot(steep, key, of_query, input_precision=PRECISION)
        if RANK > 0:
            of_query_low = tl.dot(steep, tl.trans(feature), of_query_low, input_precision=PRECISION)
    row = program * ROWS + index
    tl.store(of_rows + row[:, None] * CHANNELS + channel, of_query.to(of_rows.dtype.element_ty))
    if RANK > 0:
        tl.store(of_low + row[:, None] * RANK + rank, of_query_low.to(of_low.dtype.element_ty))


@triton.jit
def read_of_own(
    rows: tl.tensor, image: tl.tensor, position: tl.tensor, gradient: tl.tensor, logs: tl.tensor,
    along: tl.tensor, other: tl.tensor, of_image: tl.tensor, of_rows: tl.tensor, OTHER: tl.constexpr,
    PRECISION: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of every n-th tile of a mask's image tokens; with FEW rows, also their summand of
    the rows' gradient. `other`: the gradient of the image tokens from their other uses.
    """
    form = image.dtype.element_ty
    mask = tl.program_id(0).to(tl.int64)
    program = mask * tl.num_programs(1) + tl.program_id(1)
    index, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    row = mask * ROWS + index
    query = tl.load(rows + row[:, None] * CHANNELS + channel)
    slope = tl.load(gradient + row[:, None] * CHANNELS + channel)
    log, mean = tl.load(logs + row), tl.load(along + row)
    of_query = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in tl.range(tl.program_id(1) * TILE, N, tl.num_programs(1) * TILE):
        place = (start + tl.arange(0, TILE))[:, None] * CHANNELS + channel
        x = tl.load(image + mask * (N * CHANNELS) + place)
        key = keys_of(x, position, place, mask, N, CHANNELS, False)
        zeros = tl.zeros((ROWS, TILE), tl.float32)
        weights, steep = slopes(query, slope, x, key, zeros, zeros, log, mean, PRECISION)
        if FEW:
            of_query = tl.dot(steep, key, of_query, input_precision=PRECISION)
            of_x = tl.dot(tl.trans(weights), slope, input_precision=PRECISION)
            of_x = tl.dot(tl.trans(steep), query, of_x, input_precision=PRECISION)
        else:
            of_x = tl.dot(tl.trans(slope), weights, input_precision=PRECISION)
            of_x = tl.trans(tl.dot(tl.trans(query), steep, of_x, input_precision=PRECISION))
        of_x = of_x.to(form)
        if OTHER:
            of_x += tl.load(other + mask * (N * CHANNELS) + place)
        tl.store(of_image + mask * (N * CHANNELS) + place, of_x)
    if FEW:
        row = program * ROWS + index
        tl.store(of_rows + row[:, None] * CHANNELS + channel, of_query.to(of_rows.dtype.element_ty))


@triton.jit(do_not_specialize=["masks", "share"])
def read_of_shared(
    rows: tl.tensor, low: tl.tensor, image: tl.tensor, placed: tl.tensor, features: tl.tensor,
    basis: tl.tensor, gradient: tl.tensor, gradient_low: tl.tensor, logs: tl.tensor, along: tl.tensor,
    other: tl.tensor, of_image: tl.tensor, of_features: tl.tensor, of_basis: tl.tensor, masks: tl.tensor,
    share: tl.tensor, OTHER: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a tile of the features of an image's masks, and the summand of a share of its
    masks of those of the image tokens and, from `other`, of the basis.
    """
    tile, part, number = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    summand = number * tl.num_programs(1) + part
    index, channel, rank = tl.arange(0, BLOCK), tl.arange(0, CHANNELS), tl.arange(0, 16)
    token = tile * TILE + tl.arange(0, TILE)
    place = token[:, None] * CHANNELS + channel
    x = tl.load(image + number * (N * CHANNELS) + place)
    key = tl.load(placed + number * (N * CHANNELS) + place)
    of_x = tl.zeros((CHANNELS, TILE), tl.float32)
    if RANK > 0:
        base = tl.load(basis + rank[:, None] * CHANNELS + channel)
        of_base = tl.zeros((RANK, CHANNELS), tl.float32)
    first = number * masks + part * share
    for mask in tl.range(first, tl.minimum(first + share, (number + 1) * masks)):
        if RANK > 0:
            feature = tl.load(features + mask * (RANK * N) + rank[:, None] * N + token)
            of_feature = tl.zeros((RANK, TILE), tl.float32)
        if OTHER:
            more = tl.load(other + mask * (N * CHANNELS) + place)
            of_x += tl.trans(more).to(tl.float32)
            if RANK > 0:
                of_feature = tl.dot(base, tl.trans(more), of_feature, input_precision=PRECISION)
                of_base = tl.dot(feature, more, of_base, input_precision=PRECISION)
        for block in tl.range(BLOCKS):
            row = mask * ROWS + block * BLOCK + index
            query = tl.load(rows + row[:, None] * CHANNELS + channel)
            slope = tl.load(gradient + row[:, None] * CHANNELS + channel)
            log, mean = tl.load(logs + row), tl.load(along + row)
            logits, steep = tl.zeros((BLOCK, TILE), tl.float32), tl.zeros((BLOCK, TILE), tl.float32)
            if RANK > 0:
                query_low = tl.load(low + row[:, None] * RANK + rank)
                slope_low = tl.load(gradient_low + row[:, None] * RANK + rank)
                logits = tl.dot(query_low, feature, logits, input_precision=PRECISION)
                steep = tl.dot(slope_low, feature, steep, input_precision=PRECISION)
            weights, steep = slopes(query, slope, x, key, logits, steep, log, mean, PRECISION)
            of_x = tl.dot(tl.trans(slope), weights, of_x, input_precision=PRECISION)
            of_x = tl.dot(tl.trans(query), steep, of_x, input_precision=PRECISION)
            if RANK > 0:
                of_feature = tl.dot(tl.trans(slope_low), weights, of_feature, input_precision=PRECISION)
                of_feature = tl.dot(tl.trans(query_low), steep, of_feature, input_precision=PRECISION)
        if RANK > 0:
            at = of_features + mask * (RANK * N) + rank[:, None] * N + token
            tl.store(at, of_feature.to(of_features.dtype.element_ty))
    place = summand * (N * CHANNELS) + place
    tl.store(of_image + place, tl.trans(of_x).to(of_image.dtype.element_ty))
    if RANK > 0:
        of_basis += (summand * (N // TILE) + tile) * (RANK * CHANNELS)
        tl.store(of_basis + rank[:, None] * CHANNELS + channel, of_base)


class ReadImage(torch.autograd.Function):
    """See the module. Returns what is read, [M, R, C], and x for its other uses: `image`, [M, N, C], or of a
    shared image a view of it without the features, [B, M / B, N, C], whose gradient is that of x.

    rows [M, R, C]; image [B, N, C], the masks of an image being neighbours and as many for each; placed, of a
    shared image: image + position [B, N, C], of others position [N, C], in both cases without a gradient;
    features [M, 16, N] and basis [16, C] of a shared image, or None for both. All have one number format.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, image: Tensor, placed: Tensor, features: Tensor | None, basis: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (count, real, channels), (images, tokens, _) = rows.shape, image.shape
        size = max(16, triton.next_power_of_2(real))  # products need 16 rows
        given, image, placed = padded(rows, size), image.contiguous(), placed.contiguous()
        low, of_mask, base, rank = given, image, image, 0
        if features is not None and basis is not None:
            of_mask, base, rank = features.contiguous(), basis.contiguous(), len(basis)
            low = given @ basis.T
        shared, (tile, warps, stages) = placed.dim() == 3, FORWARD_PLACES[size]
        parts = _parts(count, tokens, tile)
        kind = torch.float32 if parts > 1 else image.dtype
        out, out_low = (image.new_empty((count, parts, size, x), dtype=kind) for x in (channels, rank))
        logs = image.new_empty((count, parts, size), dtype=torch.float32)
        if count:
            read_forward[(count, parts)](
                given, low, image, placed, of_mask, out, out_low, logs, count // images, precision_of(image),
                shared, rank, size, tokens, channels, tile, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        if parts > 1:
            log = logs.logsumexp(1, keepdim=True)
            share = (logs - log).exp()[..., None]
            out, out_low = ((x * share).sum(1, keepdim=True).to(image.dtype) for x in (out, out_low))
            logs = log
        read, out_low, logs = out[:, 0], out_low[:, 0], logs[:, 0]
        if rank:
            read = read + out_low @ base
        ctx.save_for_backward(given, low, image, placed, of_mask, base, read, logs, out_low)
        ctx.shared, ctx.real = shared, real
        ctx.set_materialize_grads(False)  # zeros for an image without another use would be as large as it
        return read[:, :real], image[:, None].expand(-1, count // images, -1, -1) if shared else image

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        given, low, image, placed, features, basis, read, logs, out_low = ctx.saved_tensors
        (count, rows, channels), (images, tokens, _), rank = given.shape, image.shape, out_low.shape[2]
        masks, precision, few = count // images, precision_of(image), rows <= FEW_ROWS and not ctx.shared
        gradient = torch.zeros_like(read) if gradient is None else padded(gradient, rows)
        along = products(read, gradient)
        gradient_low = gradient @ basis.T if rank else gradient
        more = image if other is None else other.contiguous()
        tile, warps, stages = OWN_PLACES[rows] if few else ROWS_PLACES[rows]
        parts = _parts(count, tokens, tile)
        kind = torch.float32 if parts > 1 else image.dtype
        of_rows, of_low = (image.new_empty((count, parts, rows, x), dtype=kind) for x in (channels, rank))
        if count and not few:
            read_of_rows[(count, parts)](
                given, low, image, placed, features, gradient, gradient_low, logs, along, of_rows, of_low,
                masks, precision, ctx.shared, rank, rows, tokens, channels, tile, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
        if not ctx.shared:
            of_image, (tile, warps, stages) = torch.empty_like(image), OWN_PLACES[rows]
            parts = _parts(count, tokens, tile)
            if count:
                read_of_own[(count, parts)](
                    given, image, placed, gradient, logs, along, more, of_image, of_rows, other is not None,
                    precision, few, rows, tokens, channels, tile, num_warps=warps, num_stages=stages,
                )  # fmt: skip
            return summed(of_rows)[:, : ctx.real].to(given.dtype), of_image, None, None, None
        tile, warps, stages = SHARED_PLACES
        shares = min(max(masks, 1), triton.cdiv(SHARED_PROGRAMS, images * (tokens // tile)))
        kind = torch.float32 if shares > 1 else image.dtype
        of_image = image.new_empty((images, shares, tokens, channels), dtype=kind)
        of_features = torch.empty_like(features)
        of_base = image.new_empty((images, shares, tokens // tile, rank, channels), dtype=torch.float32)
        read_of_shared[(tokens // tile, shares, images)](
            given, low, image, placed, features, basis, gradient, gradient_low, logs, along, more, of_image,
            of_features, of_base, masks, triton.cdiv(masks, shares), other is not None, precision, rank,
            triton.cdiv(ctx.real, BLOCK), min(BLOCK, rows), rows, tokens, channels, tile, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        of_image, of_rows = summed(of_image).to(image.dtype), summed(of_rows).to(given.dtype)
        if not rank:
            return of_rows[:, : ctx.real], of_image, None, None, None
        of_low = summed(of_low).to(given.dtype)
        # The basis takes part in the logits, in what is read, and in x for its other uses.
        of_basis = of_base.sum((0, 1, 2))
        for narrow, wide in ((of_low, given), (out_low, gradient)):
            of_basis += narrow.flatten(0, 1).T @ wide.flatten(0, 1)
        of_rows = (of_rows + of_low @ basis)[:, : ctx.real]
        return of_rows, of_image, None, of_features, of_basis.to(basis.dtype)


def _parts(masks: int, tokens: int, tile: int) -> int:
    """Programs that share a mask: a power of two, each with whole tiles."""
    parts = 1
    while masks * parts < PROGRAMS and tokens % (2 * parts * tile) == 0:
        parts *= 2
    return parts
