"""Masks as pixels in plain torch, equal bit for bit to sa1b.masks.raster.

Takes the place of the kernels of sa1b.masks.raster_triton on a GPU where they are not proved. One call fills
a batch of images of different sizes, without a loop over masks or runs: a mask is foreground at a pixel if an
odd number of its runs end at the source pixel that this one reads, or before it. A binary search counts them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sa1b.masks.runs import check_size

Size = int | Tensor
Flip = bool | Tensor
Axis = tuple[int, Tensor, Any]  # pixels of the dense mask, numerators [N] and denominators of `source_pixel`
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32)
_TOGETHER = 1 << 25  # pixels; 12 bytes for each
PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet, RGB 0..255


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
    """Masks resized to height x width and rasterised, as by `sa1b.masks.geometry.resize`.

    Args:
        runs: integers [R], the pixels of each run, as in `sa1b.masks.runs.Runs`. Its device is used.
        offsets: int64 [N + 1], on the same device.
        source_height: height of the image in pixels: one value for all masks, or integers [N].
        source_width: likewise. The runs of a mask must add up to its source_height * source_width.
        height: pixels of a dense mask.
        width: pixels of a dense mask.
        flip: mirror the image left to right, one value for all masks or bool [N]: column
            source_width - 1 - x of the source is read in place of column x. Equals this function on
            `sa1b.masks.geometry.flip_horizontal` of the runs, bit for bit. The mirrored
            dense mask, `[..., ::-1]`, differs if the centre of a pixel falls between two source columns, as
            at exactly half the size.
        out: buffer to write, [N, height, width] of a dtype below, contiguous, on the same device.
        dtype: dtype of a new buffer: torch.uint8, bool, bfloat16 or float32.

    Returns:
        `out`, or a new [N, height, width]: 1 is foreground, 0 background. On a CUDA device the host does not
        wait for the result if the source sizes are ints or on the CPU.

    Raises:
        SizeError: height or width is not a valid image size.
    """
    height, width = check_size(height, width)
    source = _sources(offsets, source_height, source_width)
    axes = [(target, source[i], 2 * target) for i, target in enumerate((height, width))]
    return _fill(runs, offsets, source, axes, flip, out, dtype)


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
    """Masks in the padded square of image_size pixels, rasterised at size x size, as `geometry.frame`.

    Args, where they are not those of `rasterize`:
        image_size: pixels of the square that holds the resized image at its top left.
        size: pixels of a dense mask.
        taken: int64 [N, 2], rows and columns of the square that each mask's image covers, 1 to image_size; by
            default its longer side covers the complete side of the square.
        flip: mirror the image within its width; the padding stays on the right.

    Returns:
        `out`, or a new [N, size, size]: 1 is foreground, 0 background and padding.

    Raises:
        SizeError: image_size or size is not a valid image size.
    """
    image_size, size = check_size(image_size, size)
    source = _sources(offsets, source_height, source_width)
    taken = framed_sizes(source.T, image_size) if taken is None else taken.to(source)
    axes = [(size, image_size * source[i], 2 * size * taken[:, i, None]) for i in range(2)]
    return _fill(runs, offsets, source, axes, flip, out, dtype)


def framed_sizes(source_sizes: Tensor, image_size: int) -> Tensor:
    """Rows and columns of the padded square that images cover, int64 [N, 2]; see sa1b.masks.grid."""
    longer = source_sizes.amax(dim=1, keepdim=True) if len(source_sizes) else source_sizes[:, :1]
    framed: Tensor = framed_side(source_sizes, longer, image_size)
    return framed


def inside_image(framed: Tensor, image_size: int, size: int) -> Tensor:
    """Pixels of the square at `size` whose centre is in the image of `framed_sizes`: bool [N, size, size]."""
    target = torch.arange(size, device=framed.device)
    rows, columns = (source_pixel(target, image_size, 2 * size) < framed[:, i : i + 1] for i in range(2))
    inside: Tensor = rows[:, :, None] & columns[:, None, :]
    return inside


def normalised(images: Tensor, sizes: Tensor | None, mean: Tensor, std: Tensor) -> Tensor:
    """Normalised pixels float32 [B, 3, S, S] of images uint8 [B, 3, S, S]; 0 outside `sizes`, [B, 2]."""
    pixels = images.to(torch.float32).sub_(mean).div_(std)
    if sizes is not None:
        pixels_of_axis = torch.arange(images.shape[-1], device=images.device)
        rows, columns = (pixels_of_axis < sizes.to(images.device)[:, :, None]).unbind(1)
        pixels *= rows[:, None, :, None]
        pixels *= columns[:, None, None, :]
    return pixels


# The rule of sa1b.masks.grid for torch; sa1b.masks.raster_triton compiles the same three functions. So they
# contain only arithmetic, and their annotations are quoted, because Triton does not look those up.


def framed_side(side: "Any", longer: "Any", image_size: "Any") -> "Any":
    """The pixels that one side of an image takes in the padded square: `sa1b.masks.grid.scaled_side`."""
    taken = (2 * side * image_size + longer) // (2 * longer)
    return taken + (taken < 1)


def source_pixel(target: "Any", numerator: "Any", denominator: "Any") -> "Any":
    """The source pixel that a target pixel reads: `sa1b.masks.grid.Axis.sources` without the limit."""
    return (2 * target + 1) * numerator // denominator


def first_target(source: "Any", numerator: "Any", denominator: "Any") -> "Any":
    """The number of target pixels that read a source pixel before this one: `sa1b.masks.grid.firsts`."""
    return (source * denominator + numerator - 1) // (2 * numerator)


def of_masks(value: Size | Flip, offsets: Tensor) -> Tensor:
    device = offsets.device
    if not isinstance(value, Tensor):
        value = torch.full((), value, device=device)
    return value.to(device, non_blocking=device.type != "cpu").expand(offsets.numel() - 1)


def _sources(offsets: Tensor, height: Size, width: Size) -> Tensor:
    return torch.stack([of_masks(size, offsets).long() for size in (height, width)])


def _fill(
    runs: Tensor,
    offsets: Tensor,
    source: Tensor,
    axes: Sequence[Axis],
    flip: Flip,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Dense masks of images of the sizes `source`, int64 [2, N]; `axes`: their rows and their columns."""
    device, count, (height, width) = runs.device, source.shape[1], (pixels for pixels, *_ in axes)
    mirror = of_masks(flip, offsets).bool()
    if out is None:
        out = torch.empty((count, height, width), dtype=dtype, device=device)
    rows, columns = (
        source_pixel(torch.arange(pixels, device=device), numerator[:, None], denominator)
        for pixels, numerator, denominator in axes
    )
    inside = (rows < source[0, :, None])[:, :, None] & (columns < source[1, :, None])[:, None]
    columns = torch.where(mirror[:, None], source[1, :, None] - 1 - columns, columns)
    ends = runs.to(torch.int64).cumsum(0)  # over all masks, whose pixels follow one another
    before = source.prod(0).cumsum(0) - source.prod(0)
    columns = columns * source[0, :, None] + before[:, None]
    together = max(1, _TOGETHER // max(1, height * width))
    for i in range(0, count, together):
        part = slice(i, i + together)
        pixels = rows[part, :, None] + columns[part, None]
        ended = torch.searchsorted(ends, pixels, right=True, out_int32=True)
        ended -= offsets[:-1][part, None, None]
        out[part] = ended.bitwise_and_(1).bitwise_and_(inside[part])
    return out
