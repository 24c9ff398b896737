"""Attention over a complete image with relative positions, as Triton kernels; heads keep their length.

For the query q at row r and column c of a grid, and the key k at row s and column t (see
sa1b.sam.image_encoder):

    logit = q.k / sqrt(d) + rows[r, c, s] + columns[r, c, t]

A tile of keys is one row of the grid. So the first position is one number for each query of a tile, and the
second one is the same matrix for all tiles, which stays in registers. As in flash attention (Dao,
"FlashAttention-2", 2023), no logits are stored: the softmax is that of the tiles so far, and the backward
pass computes the logits again, and the weights from the logarithm of their sum for each query. One kernel
computes the gradients of queries and positions, and one those of keys and values. Both compute the logits and
the gradients of the weights. All sums are in float32 and in a fixed order.

Queries, keys and values lie side by side in the result of their projection, and so do their gradients.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sa1b.sam.norm_triton import precision_of

LOG2E = tl.constexpr(1.4426950408889634)  # the kernels compute powers of 2


class Places(NamedTuple):
    """Queries of a tile, warps of a program, stages of loads, most registers of a thread (0: what it needs),
    and, of `KEYS`, the rows of the grid that a program has.
    """

    tile: int
    warps: int
    stages: int
    registers: int = 0
    rows: int = 1


FORWARD = Places(128, 8, 3)
QUERIES = Places(128, 8, 3)
KEYS = Places(64, 8, 3, rows=2)


def fits(side: int, length: int) -> bool:
    """Whether the kernels support a grid of side x side tokens, and heads of this length."""
    return side in (16, 32, 64) and length == 64


@triton.jit
def attention_forward(
    qkv: tl.tensor, rows: tl.tensor, columns: tl.tensor, out: tl.tensor, logs: tl.tensor,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the results of TILE queries, and the logarithms to base 2 of the sums of their weights."""
    head, heads, image = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    query, key, number = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, SIDE), tl.arange(0, D)
    token = 3 * heads * D
    qkv += image * (SIDE * SIDE) * token + head * D
    first = (image * heads + head) * (SIDE * SIDE)
    rows, columns, step = rows + first, columns + first, tl.num_programs(2) * heads * (SIDE * SIDE)
    in_rows = query // SIDE * step + query % SIDE * SIDE
    in_columns = (query % SIDE * step + query // SIDE * SIDE)[:, None] + key
    q = tl.load(qkv + query[:, None] * token + number)
    column = tl.load(columns + in_columns).to(tl.float32) * LOG2E
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    read = tl.zeros((TILE, D), tl.float32)
    for s in tl.range(SIDE):
        place = (s * SIDE + key)[:, None] * token + number
        k, v = tl.load(qkv + heads * D + place), tl.load(qkv + 2 * heads * D + place)
        row = tl.load(rows + in_rows + s).to(tl.float32) * LOG2E
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E) + column
        higher = tl.maximum(highest, tl.max(logits, 1) + row)
        weights = tl.exp2(logits - (higher - row)[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(weights, 1)
        read = tl.dot(weights.to(v.dtype), v, read * kept[:, None], input_precision=PRECISION)
        highest = higher
    place = (image * (SIDE * SIDE) * heads + head) * D + query[:, None] * (heads * D) + number
    tl.store(out + place, (read / total[:, None]).to(out.dtype.element_ty))
    tl.store(logs + (image * heads + head) * (SIDE * SIDE) + query, highest + tl.log2(total))


@triton.jit
def attention_of_queries(
    qkv: tl.tensor, rows: tl.tensor, columns: tl.tensor, out: tl.tensor, gradient: tl.tensor, logs: tl.tensor,
    means: tl.tensor, offsets: tl.tensor, slopes: tl.tensor, row_slopes: tl.tensor, column_slopes: tl.tensor,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of TILE queries and of their positions. For the other kernel: the products of
    results and gradients, and the logarithms less the positions of each row of keys.
    """
    head, heads, image = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    query, key, number = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, SIDE), tl.arange(0, D)
    token = 3 * heads * D
    first = image * (SIDE * SIDE) * token + head * D
    qkv, slopes = qkv + first, slopes + first
    first = (image * heads + head) * (SIDE * SIDE)
    rows, columns, column_slopes = rows + first, columns + first, column_slopes + first
    step = tl.num_programs(2) * heads * (SIDE * SIDE)
    in_rows = query // SIDE * step + query % SIDE * SIDE
    in_columns = (query % SIDE * step + query // SIDE * SIDE)[:, None] + key
    q = tl.load(qkv + query[:, None] * token + number)
    column = tl.load(columns + in_columns).to(tl.float32) * LOG2E
    in_out = (image * (SIDE * SIDE) * heads + head) * D + query[:, None] * (heads * D) + number
    slope = tl.load(gradient + in_out)
    mean = tl.sum(slope.to(tl.float32) * tl.load(out + in_out).to(tl.float32), 1)
    at = (image * heads + head) * (SIDE * SIDE) + query
    tl.store(means + at, mean)
    log = tl.load(logs + at)
    offsets += (image * heads + head) * (SIDE * SIDE * SIDE) + query
    # By r, s, image, head and c, so that a tile writes numbers side by side.
    row_slopes += (image * heads + head) * SIDE + query // SIDE * step + query % SIDE
    of_column = tl.zeros((TILE, SIDE), tl.float32)
    of_q = tl.zeros((TILE, D), tl.float32)
    for s in tl.range(SIDE):
        place = (s * SIDE + key)[:, None] * token + number
        k, v = tl.load(qkv + heads * D + place), tl.load(qkv + 2 * heads * D + place)
        row = tl.load(rows + in_rows + s).to(tl.float32) * LOG2E
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E) + column
        offset = log - row
        tl.store(offsets + s * (SIDE * SIDE), offset)
        weights = tl.exp2(logits - offset[:, None])
        steep = weights * (tl.dot(slope, tl.trans(v), input_precision=PRECISION) - mean[:, None])
        tl.store(row_slopes + s * (step // SIDE), tl.sum(steep, 1).to(row_slopes.dtype.element_ty))
        of_column += steep
        of_q = tl.dot(steep.to(k.dtype), k, of_q, input_precision=PRECISION)
    tl.store(column_slopes + in_columns, of_column.to(column_slopes.dtype.element_ty))
    tl.store(slopes + query[:, None] * token + number, (of_q * SCALE).to(slopes.dtype.element_ty))


@triton.jit
def attention_of_keys(
    qkv: tl.tensor, columns: tl.tensor, gradient: tl.tensor, means: tl.tensor, offsets: tl.tensor,
    slopes: tl.tensor, PRECISION: tl.constexpr, SCALE: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of the keys and values of ROWS rows of the grid."""
    # Logits are transposed, so that weights are in registers for the product with the gradient.
    head, heads, image = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    s, t, number = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE), tl.arange(0, D)
    key = tl.program_id(0) * (ROWS * SIDE) + tl.arange(0, ROWS * SIDE)
    token = 3 * heads * D
    first = image * (SIDE * SIDE) * token + head * D
    qkv += first
    columns += (image * heads + head) * (SIDE * SIDE)
    step = tl.num_programs(2) * heads * (SIDE * SIDE)
    gradient += (image * (SIDE * SIDE) * heads + head) * D
    means += (image * heads + head) * (SIDE * SIDE)
    offsets += (image * heads + head) * (SIDE * SIDE * SIDE)
    place = key[:, None] * token + number
    k, v = tl.load(qkv + heads * D + place), tl.load(qkv + 2 * heads * D + place)
    of_k = tl.zeros((ROWS * SIDE, D), tl.float32)
    of_v = tl.zeros((ROWS * SIDE, D), tl.float32)
    for start in tl.range(0, SIDE * SIDE, TILE):
        query = start + tl.arange(0, TILE)
        r, c = query // SIDE, query % SIDE
        q = tl.load(qkv + query[:, None] * token + number)
        slope = tl.load(gradient + query[:, None] * (heads * D) + number)
        in_columns = t[:, None] + r * SIDE + c * step
        column = tl.load(columns + in_columns).to(tl.float32)
        offset, mean = tl.load(offsets + s[:, None] * (SIDE * SIDE) + query), tl.load(means + query)
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION).reshape(ROWS, SIDE, TILE)
        logits = (logits * SCALE + column[None]) * LOG2E - offset[:, None]
        weights = tl.exp2(logits).reshape(ROWS * SIDE, TILE)
        of_v = tl.dot(weights.to(v.dtype), slope, of_v, input_precision=PRECISION)
        steep = weights * (tl.dot(v, tl.trans(slope), input_precision=PRECISION) - mean)
        of_k = tl.dot(steep.to(k.dtype), q, of_k, input_precision=PRECISION)
    tl.store(slopes + first + heads * D + place, (of_k * SCALE).to(slopes.dtype.element_ty))
    tl.store(slopes + first + 2 * heads * D + place, of_v.to(slopes.dtype.element_ty))


class TiledAttention(torch.autograd.Function):
    """The result [B, N, heads, d] of queries, keys and values [B, N, 3, heads, d] with their positions.

    rows, columns: [B, heads, side, side, side], by r, c, and s or t. In memory, r and c come first, as in
    products of the queries of a row or column; others are copied.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        qkv, rows = qkv.contiguous(), rows.permute(2, 0, 1, 3, 4).contiguous()
        columns = columns.permute(3, 0, 1, 2, 4).contiguous()
        images, tokens, _, heads, length = qkv.shape
        side, tile = rows.shape[-1], FORWARD.tile
        out = qkv.new_empty(images, tokens, heads, length)
        logs = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
        attention_forward[(tokens // tile, heads, images)](
            qkv, rows, columns, out, logs, precision_of(qkv), length**-0.5, side, length, tile,
            **_options(FORWARD),
        )  # fmt: skip
        ctx.save_for_backward(qkv, rows, columns, out, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, rows, columns, out, logs = ctx.saved_tensors
        images, tokens, _, heads, length = qkv.shape
        side = rows.shape[-1]
        gradient, means, slopes = gradient.contiguous(), torch.empty_like(logs), torch.empty_like(qkv)
        offsets = logs.new_empty(images, heads, side, tokens)
        of_rows, of_columns = rows.new_empty(side, side, images, heads, side), torch.empty_like(columns)
        sizes = precision_of(qkv), length**-0.5, side, length
        attention_of_queries[(tokens // QUERIES.tile, heads, images)](
            qkv, rows, columns, out, gradient, logs, means, offsets, slopes, of_rows, of_columns, *sizes,
            QUERIES.tile, **_options(QUERIES),
        )  # fmt: skip
        attention_of_keys[(side // KEYS.rows, heads, images)](
            qkv, columns, gradient, means, offsets, slopes, *sizes, KEYS.rows, KEYS.tile, **_options(KEYS)
        )
        return slopes, of_rows.permute(2, 3, 0, 4, 1), of_columns.permute(1, 2, 3, 0, 4)


def _options(places: Places) -> dict[str, int | None]:
    return {"num_warps": places.warps, "num_stages": places.stages, "maxnreg": places.registers or None}
