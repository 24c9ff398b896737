"""Masks as pixels on a CUDA device: Triton kernels with the functions of raster_torch, and the same bits.

A dense mask is row-major, its runs go down columns, and nearly all of it is background, so most of the time
is spent on writes. There are two launches:

    measure_masks   Each program adds up the runs of one mask and writes the end of each one as an integer
                    key, source column and row of the dense mask, and the mask's box.
    fill            Each program writes a tile of 128 x 256 pixels: zeros outside the box, 16 bytes a thread.
                    Inside, each column finds its first run by bisection and follows its runs down.

For 16 images of 64 masks at 1024x1024, uint8, with 330 runs a mask and boxes of 1.4 % of an image, they move
1.01 times the bytes of Tensor.zero_(); `make gpu PARTS="raster sweep"` measures their time and the best
constants. Wide stores need a width and an address of `out` that are multiples of 16.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.masks import raster_torch
from sa1b.masks.raster_torch import Flip, Size, of_masks
from sa1b.masks.runs import check_size

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("masks on a CUDA device need triton: pip install 'sa1b[kernels]'") from error

NEVER = tl.constexpr(2**31 - 1)  # a row below every dense mask
COMPILED = not triton.knobs.runtime.interpret  # False: Triton's interpreter runs the kernels
# The formulas of sa1b.masks.raster_torch, compiled; the interpreter calls the Python functions.
framed_side, source_pixel, first_target = (
    triton.jit(formula) if COMPILED else formula
    for formula in (raster_torch.framed_side, raster_torch.source_pixel, raster_torch.first_target)
)
# Arguments whose values and addresses change from batch to batch: kernels are not specialised for them.
VARYING = ["runs", "offsets", "heights", "widths", "takens", "flips", "image_size", "height", "width"]
# Powers of two:
TILE_ROWS, TILE_COLUMNS = 128, 256  # largest number of pixels that a program writes
STEP_PIXELS = 4096  # pixels that a program processes at a time
RUNS_BLOCK = 512  # runs that measure_masks reads at a time
WARPS, RUNS_WARPS = 4, 8

ONES = {torch.uint8: 1, torch.bool: 1, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000}  # bits of 1
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes -> dtype


@triton.jit
def axis(
    source: tl.tensor, taken: tl.tensor, image_size: tl.tensor, target: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Numerator and denominator of the rule. For a plain resize, image_size is 0 and `taken` is 1."""
    return source * tl.maximum(image_size, 1), taken * target * 2


@triton.jit(do_not_specialize=VARYING)
def measure_masks(
    runs: tl.tensor, offsets: tl.tensor, heights: tl.tensor, widths: tl.tensor, takens: tl.tensor,
    flips: tl.tensor, keys: tl.tensor, places: tl.tensor, image_size: tl.tensor, height: tl.tensor,
    width: tl.tensor, SIZES: tl.constexpr, TAKEN: tl.constexpr, FLIPS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the keys of the ends of the runs, int64 [R], and a row for each mask into places, int64 [N, 8].

    A row of places: top, bottom, left and right of the mask's box in the dense mask, clipped to the image;
    numerator and denominator of its columns; the source column that mirrors column 0, or -1.
    """
    # The kernels follow the rule of sa1b.masks.grid in int64. A key is source column * height + row of the
    # dense mask, the first row that reads the source pixel or one below it. So keys ascend, and a pixel
    # belongs to the run with start key <= key of the pixel < stop key. Loops with loaded bounds are `while`
    # loops: Triton 3.6's interpreter refuses a loaded bound of `range` with numpy 2.4.
    mask = tl.program_id(0).to(tl.int64)
    if SIZES:
        source_height, source_width = (
            tl.load(heights + mask).to(tl.int64),
            tl.load(widths + mask).to(tl.int64),
        )
    else:
        source_height, source_width = heights.to(tl.int64), widths.to(tl.int64)
    if FLIPS:
        mirror = tl.where(tl.load(flips + mask) != 0, source_width - 1, -1)
    else:
        mirror = tl.where(flips != 0, source_width - 1, -1)
    if TAKEN:
        rows, columns = tl.load(takens + 2 * mask).to(tl.int64), tl.load(takens + 2 * mask + 1).to(tl.int64)
    else:
        longer = tl.maximum(source_height, source_width)
        rows = framed_side(source_height, longer, image_size)
        columns = framed_side(source_width, longer, image_size)
    row_numerator, row_denominator = axis(source_height, rows, image_size, height)
    numerator, denominator = axis(source_width, columns, image_size, width)

    start, stop = tl.load(offsets + mask), tl.load(offsets + mask + 1)
    position = tl.full((), 0, tl.int64)  # end of the runs read so far
    lasts = tl.zeros((BLOCK,), tl.int64)  # per lane of the block, in source pixels; reduced at the end
    begins = lasts + source_height * source_width
    tops, bottoms = lasts + source_height, lasts
    first = start
    while first < stop:
        index = first + tl.arange(0, BLOCK)
        lengths = tl.load(runs + index, mask=index < stop, other=0).to(tl.int64)
        ends = position + tl.cumsum(lengths, 0)
        position += tl.sum(lengths, 0)
        column = ends // source_height
        row = ends - column * source_height
        key = column * height + first_target(row, row_numerator, row_denominator)
        tl.store(keys + index, key, mask=index < stop)

        filled = ((index - start) % 2 == 1) & (lengths > 0)
        begins = tl.where(filled, tl.minimum(begins, ends - lengths), begins)
        lasts = tl.where(filled, tl.maximum(lasts, ends), lasts)
        bottom = tl.where(row == 0, source_height, row)
        within = lengths <= bottom  # if False, the run covers several columns and touches top and bottom
        tops = tl.where(filled, tl.minimum(tops, tl.where(within, bottom - lengths, 0)), tops)
        bottom = tl.where(within, bottom, source_height)
        bottoms = tl.where(filled, tl.maximum(bottoms, bottom), bottoms)
        first += BLOCK

    top = first_target(tl.min(tops, 0), row_numerator, row_denominator)
    bottom = first_target(tl.max(bottoms, 0), row_numerator, row_denominator)
    left = tl.min(begins, 0) // source_height
    right = (tl.max(lasts, 0) + source_height - 1) // source_height
    mirrored = mirror + 1 - left
    left = first_target(tl.where(mirror < 0, left, mirror + 1 - right), numerator, denominator)
    right = first_target(tl.where(mirror < 0, right, mirrored), numerator, denominator)
    places += 8 * mask
    tl.store(places, tl.maximum(top, 0))
    tl.store(places + 1, tl.minimum(bottom, height))
    tl.store(places + 2, tl.maximum(left, 0))
    tl.store(places + 3, tl.minimum(right, width))
    tl.store(places + 4, numerator)
    tl.store(places + 5, denominator)
    tl.store(places + 6, mirror)


@triton.jit
def following(
    keys: tl.tensor, run: tl.tensor, count: tl.tensor, base: tl.tensor, bottom: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The rows start <= row < stop of a foreground run in each column; NEVER in columns without it."""
    place = keys + 2 * run.to(tl.int64)
    start = tl.load(place, mask=run < count, other=0) - base
    stop = tl.load(place + 1, mask=run < count, other=0) - base
    here = (run < count) & (start < bottom)
    start = tl.where(here, tl.maximum(start, 0), NEVER).to(tl.int32)
    stop = tl.where(here, tl.minimum(stop, bottom), NEVER).to(tl.int32)
    return start, stop


@triton.jit
def store(
    pixels: tl.tensor, values: tl.tensor, row: tl.tensor, column: tl.tensor, height: tl.tensor,
    width: tl.tensor,
) -> None:  # fmt: skip
    place = row[:, None].to(tl.int64) * width + column[None, :]
    writable = (row[:, None] < height) & (column[None, :] < width)
    tl.store(pixels + place, values.to(pixels.dtype.element_ty), mask=writable)


@triton.jit
def draw(
    offsets: tl.tensor, place: tl.tensor, keys: tl.tensor, pixels: tl.tensor, top: tl.tensor,
    column: tl.tensor, height: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, STEP: tl.constexpr,
    ONE: tl.constexpr,
) -> None:  # fmt: skip
    """Write ROWS rows of these columns of a mask, from `top` on, but no pixel outside of it."""
    read = source_pixel(column.to(tl.int64), tl.load(place + 4), tl.load(place + 5))
    mirror = tl.load(place + 6)
    base = tl.where(mirror < 0, read, mirror - read) * height

    first = tl.load(offsets)
    keys += first
    count = ((tl.load(offsets + 1) - first) // 2).to(tl.int32)  # number of foreground runs
    bottom = tl.load(place + 1)
    inside = (column >= tl.load(place + 2)) & (column < tl.load(place + 3))

    # Bisection: in each column the first run that ends after `top`.
    run, high = tl.where(inside, 0, count), tl.zeros_like(column) + count
    span = count
    while span > 0:
        middle = run + (high - run) // 2
        stop = tl.load(keys + 2 * middle.to(tl.int64) + 1, mask=run < high, other=0)
        after = stop > base + top
        run, high = tl.where((run < high) & ~after, middle + 1, run), tl.where(after, middle, high)
        span = span // 2

    start, stop = following(keys, run, count, base, bottom)
    for step in range(0, ROWS, STEP):
        row = top + step + tl.arange(0, STEP)
        filled = (row[:, None] >= start[None, :]) & (row[:, None] < stop[None, :])
        passed = stop <= top + step + STEP
        while tl.max(passed.to(tl.int32), 0) > 0:
            run += passed.to(tl.int32)
            start, stop = following(keys, run, count, base, bottom)
            filled |= (row[:, None] >= start[None, :]) & (row[:, None] < stop[None, :])
            passed = stop <= top + step + STEP
        store(pixels, tl.where(filled, ONE, 0), row, column, height, width)


@triton.jit(do_not_specialize=["offsets", "height", "programs"])
def fill(
    offsets: tl.tensor, places: tl.tensor, keys: tl.tensor, pixels: tl.tensor, height: tl.tensor,
    width: tl.tensor, programs: tl.tensor, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
    ONE: tl.constexpr,
) -> None:  # fmt: skip
    """Fill one tile of a mask, of which `programs` programs fill the tiles."""
    mask = (tl.program_id(0) // programs).to(tl.int64)
    tile = tl.program_id(0) % programs
    offsets += mask
    pixels += mask * height * width
    place = places + 8 * mask
    box_top, box_bottom = tl.load(place).to(tl.int32), tl.load(place + 1).to(tl.int32)
    box_left, box_right = tl.load(place + 2).to(tl.int32), tl.load(place + 3).to(tl.int32)
    across = tl.cdiv(width, COLUMNS)
    top, left = tile // across * ROWS, tile % across * COLUMNS
    column = left + tl.arange(0, COLUMNS)
    beside = (left + COLUMNS <= box_left) | (left >= box_right)
    if beside | (top + ROWS <= box_top) | (top >= box_bottom):
        for step in range(0, ROWS, STEP):
            row = top + step + tl.arange(0, STEP)
            store(pixels, tl.zeros((STEP, COLUMNS), tl.int32), row, column, height, width)
    else:
        draw(offsets, place, keys, pixels, top, column, height, width, ROWS, STEP, ONE)


def rasterize(
    runs: Tensor,
    offsets: Tensor,
    source_height: Size,
    source_width: Size,
    height: int,
    width: int,
    *,
    flip: Flip = False,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """Masks resized to height x width, as by `raster_torch.rasterize`, with the same arguments.

    The runs are on a CUDA device. Offsets, and sizes on the device, are not checked: if the runs of a mask
    have a wrong sum, its pixels are wrong, but nothing outside `out` is written. The host does not wait for
    the device. If sizes and flips are numbers or on the device, the call can be part of a CUDA graph. The
    longer side of a dense mask must be below 2**30 pixels (2**30 / image_size in a frame).
    """
    height, width = check_size(height, width)
    source = (source_height, source_width)
    return launch(runs, offsets, source, None, None, target=(height, width), flip=flip, out=out, dtype=dtype)


def rasterize_frame(
    runs: Tensor,
    offsets: Tensor,
    source_height: Size,
    source_width: Size,
    image_size: int,
    size: int,
    *,
    taken: Tensor | None = None,
    flip: Flip = False,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """Masks in the padded square, as by `raster_torch.rasterize_frame`; raises the errors of `rasterize`."""
    image_size, size = check_size(image_size, size)
    if taken is not None:
        taken = taken.to(runs.device, non_blocking=True).expand(offsets.numel() - 1, 2).contiguous()
    source = (source_height, source_width)
    return launch(
        runs, offsets, source, image_size, taken, target=(size, size), flip=flip, out=out, dtype=dtype
    )


def launch(
    runs: Tensor,
    offsets: Tensor,
    source: tuple[Size, Size],
    image_size: int | None,
    taken: Tensor | None,
    *,
    target: tuple[int, int],
    flip: Flip,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Implementation of `rasterize` (image_size None) and `rasterize_frame`."""
    device, (height, width) = runs.device, target
    if runs.ndim != 1 or runs.is_floating_point() or offsets.dtype != torch.int64 or offsets.device != device:
        raise BadValue("runs must be integers [R] and offsets int64 [N + 1], on the same device")
    if device.type != "cuda" and COMPILED:
        raise BadValue(f"runs must be on a CUDA device for the Triton kernels, got {device}")
    if (2 * max(target) + 1) * (image_size or 1) >= 2**31:  # products fit int64
        raise BadValue(f"masks at {height} x {width} pixels: too large for int64; use smaller sizes")
    count, runs, offsets = offsets.numel() - 1, runs.contiguous(), offsets.contiguous()
    heights, widths = source
    if isinstance(heights, Tensor) or isinstance(widths, Tensor):
        heights, widths = (of_masks(size, offsets).contiguous() for size in source)
    else:
        check_size(heights, widths)
    is_one = not isinstance(flip, Tensor)
    mirror: Size = int(flip) if is_one else of_masks(flip, offsets).bool().contiguous().view(torch.uint8)
    shape = (count, height, width)
    out = torch.empty(shape, dtype=dtype, device=device) if out is None else out
    if out.shape != shape or out.dtype not in ONES or out.device != device or not out.is_contiguous():
        raise BadValue(
            f"out must be contiguous {list(shape)} of uint8, bool, bfloat16 or float32 on {device}, "
            f"got {out.dtype} {list(out.shape)}"
        )
    if count == 0:
        return out

    pixels = out.view(WORDS[out.element_size()])
    columns = min(TILE_COLUMNS, max(32, 1 << (width - 1).bit_length()))
    step = max(1, STEP_PIXELS // columns)
    rows = max(step, TILE_ROWS)
    programs = -(-height // rows) * -(-width // columns)
    tiling = {"ROWS": rows, "STEP": step, "COLUMNS": columns, "ONE": ONES[out.dtype], "num_warps": WARPS}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        frame = (image_size or 0, height, width)
        keys, places = measured(runs, offsets, (heights, widths), taken, mirror, frame)
        fill[(count * programs,)](offsets, places, keys, pixels, height, width, programs, **tiling)
    return out


def measured(
    runs: Tensor,
    offsets: Tensor,
    sizes: tuple[Size, Size],
    taken: Tensor | None,
    mirror: Size,
    target: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """Keys and places of N masks, see `measure_masks`."""
    keys = torch.empty(len(runs), dtype=torch.int64, device=runs.device)
    places = torch.empty((offsets.numel() - 1, 8), dtype=torch.int64, device=runs.device)
    reading = {
        "SIZES": isinstance(sizes[0], Tensor),
        "TAKEN": taken is not None,
        "FLIPS": isinstance(mirror, Tensor),
        "BLOCK": RUNS_BLOCK,
        "num_warps": RUNS_WARPS,
    }
    first = 0 if taken is None else taken
    measure_masks[(len(places),)](runs, offsets, *sizes, first, mirror, keys, places, *target, **reading)
    return keys, places
