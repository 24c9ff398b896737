"""Masks as pixels on a CUDA device: Triton kernels with the functions of raster_torch, and the same bits.

A dense mask is row-major, its runs go down columns, and nearly all of it is background, so most of the time
is spent on writes. There are two launches (sa1b.masks.kernels_triton):

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

from sa1b.masks.kernels_triton import COMPILED, fill, measure_masks
from sa1b.masks.raster_torch import Flip, Size, buffer, flips, sources
from sa1b.masks.runs import check_size

# Powers of two:
TILE_ROWS, TILE_COLUMNS = 128, 256  # largest number of pixels that a program writes
STEP_PIXELS = 4096  # pixels that a program processes at a time
RUNS_BLOCK = 512  # runs that measure_masks reads at a time
WARPS, RUNS_WARPS = 4, 8

ONES = {torch.uint8: 1, torch.bool: 1, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000}  # bits of 1
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes -> dtype


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
    """Masks in the padded square, as by `raster_torch.rasterize_frame`; errors as for `rasterize`."""
    image_size, size = check_size(image_size, size)
    if taken is not None:
        if taken.shape != (offsets.numel() - 1, 2) or taken.is_floating_point():
            raise ValueError(f"taken must be integers [{offsets.numel() - 1}, 2], got {list(taken.shape)}")
        taken = taken.to(runs.device, non_blocking=True).contiguous()
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
        raise ValueError("runs must be integers [R] and offsets int64 [N + 1], on the same device")
    if device.type != "cuda" and COMPILED:
        raise ValueError(f"runs must be on a CUDA device for the Triton kernels, got {device}")
    if (2 * max(target) + 1) * (image_size or 1) >= 2**31:  # products fit int64
        raise ValueError(f"masks at {height} x {width} pixels: too large for int64; use smaller sizes")
    count, runs, offsets = offsets.numel() - 1, runs.contiguous(), offsets.contiguous()
    sizes = source_sizes(offsets, *source)
    many = isinstance(flip, Tensor)
    mirror = flips(flip, count, device).contiguous().view(torch.uint8) if many else int(flip)
    out = buffer((count, height, width), out, dtype, device)
    if count == 0:
        return out

    keys = torch.empty(len(runs), dtype=torch.int64, device=device)
    places = torch.empty((count, 8), dtype=torch.int64, device=device)
    pixels = out.view(WORDS[out.element_size()])
    columns = min(TILE_COLUMNS, max(32, 1 << (width - 1).bit_length()))
    step = max(1, STEP_PIXELS // columns)
    rows = max(step, TILE_ROWS)
    programs = -(-height // rows) * -(-width // columns)
    tiling = {"ROWS": rows, "STEP": step, "COLUMNS": columns, "ONE": ONES[out.dtype], "num_warps": WARPS}
    reading = {
        "SIZES": isinstance(sizes[0], Tensor),
        "TAKEN": taken is not None,
        "FLIPS": many,
        "BLOCK": RUNS_BLOCK,
        "num_warps": RUNS_WARPS,
    }
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        measure_masks[(count,)](
            runs,
            offsets,
            *sizes,
            0 if taken is None else taken,
            mirror,
            keys,
            places,
            image_size or 0,
            height,
            width,
            **reading,
        )
        fill[(count * programs,)](offsets, places, keys, pixels, height, width, programs, **tiling)
    return out


def source_sizes(offsets: Tensor, height: Size, width: Size) -> tuple[Size, Size]:
    """Height and width of every mask's image: two ints, or two integer tensors [N] on the device."""
    if not isinstance(height, Tensor) and not isinstance(width, Tensor):
        return check_size(height, width)
    count, device = offsets.numel() - 1, offsets.device
    if not any(isinstance(value, Tensor) and value.device == device for value in (height, width)):
        both = sources(offsets, height, width).to(device, non_blocking=True)
        return both[0], both[1]
    tensors = []
    for name, value in (("source_height", height), ("source_width", width)):
        sizes = value if isinstance(value, Tensor) else torch.full((count,), value, device=device)
        if sizes.shape != (count,) or sizes.is_floating_point():
            raise ValueError(f"{name} must be an integer or integers [{count}], got {list(sizes.shape)}")
        tensors.append(sizes.to(device, non_blocking=True).contiguous())
    return tensors[0], tensors[1]
