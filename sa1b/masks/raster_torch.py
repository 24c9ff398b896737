"""Masks as pixels in plain torch, equal bit for bit to sa1b.masks.raster.

Takes the place of the kernels of sa1b.masks.raster_triton on a GPU where they are not proved. One call fills
a batch of images of different sizes, without a loop over masks or runs: a mask is foreground at a pixel if an
odd number of its runs end at the source pixel that this one reads, or before it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.masks.runs import check_size

Size = int | Tensor
Flip = bool | Tensor
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32)
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
        ValueError: shape, type, layout or device of an argument is wrong.
    """
    height, width = check_size(height, width)
    source = sources(offsets, source_height, source_width).to(runs.device, non_blocking=True)
    rows, columns = (
        TorchAxis(size, target, size, torch.full_like(size, 2 * target))
        for size, target in zip(source, (height, width), strict=True)
    )
    return fill_axes(runs, offsets, rows, columns, flip=flip, out=out, dtype=dtype)


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

    Args:
        runs: integers [R], as for `rasterize`.
        offsets: int64 [N + 1], on the same device.
        source_height: height of the image in pixels: one value for all masks, or integers [N].
        source_width: likewise.
        image_size: pixels of the square that holds the resized image at its top left.
        size: pixels of a dense mask.
        taken: int64 [N, 2], rows and columns of the square that each mask's image covers, 1 to image_size; by
            default its longer side covers the complete side of the square.
        flip: mirror the image within its width; the padding stays on the right.
        out: buffer to write, [N, size, size], as for `rasterize`.
        dtype: dtype of a new buffer, as for `rasterize`.

    Returns:
        `out`, or a new [N, size, size]: 1 is foreground, 0 background and padding.

    Raises:
        SizeError: image_size or size is not a valid image size.
        ValueError: shape, type, layout or device of an argument is wrong.
    """
    image_size, size = check_size(image_size, size)
    source = sources(offsets, source_height, source_width).to(runs.device, non_blocking=True)
    if taken is not None and (taken.shape != (source.shape[1], 2) or taken.is_floating_point()):
        raise BadValue(f"taken must be integers [{source.shape[1]}, 2], got {list(taken.shape)}")
    rows, columns = framed_axes(source, image_size, size, taken)
    return fill_axes(runs, offsets, rows, columns, flip=flip, out=out, dtype=dtype)


def framed_sizes(source_sizes: Tensor, image_size: int) -> Tensor:
    """Rows and columns of the padded square that images cover, int64 [N, 2]; see sa1b.masks.grid."""
    longer = source_sizes.amax(dim=1, keepdim=True) if len(source_sizes) else source_sizes[:, :1]
    framed: Tensor = framed_side(source_sizes, longer, image_size)
    return framed


def empty_frames(
    runs: Tensor,
    offsets: Tensor,
    source_height: Tensor,
    source_width: Tensor,
    image_size: int,
    size: int,
    *,
    taken: Tensor | None = None,
) -> Tensor:
    """Whether `rasterize_frame` sets no pixel of a mask, bool [N], from the runs. The host does not wait.

    The source sizes are int64 [N] on the device of the runs.
    """
    image_size, size = check_size(image_size, size)
    rows, columns = framed_axes(torch.stack((source_height, source_width)), image_size, size, taken)
    mask = masks_of(runs, offsets)
    unflipped = torch.zeros(1, dtype=torch.bool, device=runs.device).expand(len(source_height))
    stops = first_pixels(runs, mask, rows, columns, rows.seen(), unflipped)
    starts = stops.roll(1)  # of a foreground run, which follows a run of its mask
    foreground = (torch.arange(len(runs), device=runs.device) - offsets[mask]) % 2 == 1
    pixels = torch.where(foreground, stops - starts, 0)
    return torch.zeros_like(source_height).index_add_(0, mask, pixels) == 0


def inside_image(framed: Tensor, image_size: int, size: int) -> Tensor:
    """Pixels of the padded square at `size` whose centre is in the image: bool [N, size, size].

    `framed`: int64 [N, 2], rows and columns of each image in the square, as `framed_sizes` returns them.
    """
    target = torch.arange(size, device=framed.device)
    rows, columns = (source_pixel(target, image_size, 2 * size) < framed[:, i : i + 1] for i in range(2))
    inside: Tensor = rows[:, :, None] & columns[:, None, :]
    return inside


def normalised(images: Tensor, sizes: Tensor | None, mean: Tensor, std: Tensor) -> Tensor:
    """Normalised pixels float32 [B, 3, S, S] of RGB images uint8 [B, 3, S, S], the input of the encoder.

    `sizes`: int64 [B, 2], rows and columns of each image; pixels outside are set to 0 after normalisation.
    """
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
    """The number of target pixels that read a source pixel before this one: `sa1b.masks.grid.Axis.firsts`."""
    return (source * denominator + numerator - 1) // (2 * numerator)


@dataclass(frozen=True, slots=True)
class TorchAxis:
    """The rule of sa1b.masks.grid for each mask: source, numerator and denominator are int64 [N]."""

    source: Tensor
    target: int
    numerator: Tensor
    denominator: Tensor

    def reads(self) -> Tensor:
        """The source pixel that each target pixel reads, int64 [N, target]; `source` or more: background."""
        pixels = torch.arange(self.target, device=self.source.device)
        read: Tensor = source_pixel(pixels, self.numerator[:, None], self.denominator[:, None])
        return read

    def firsts(self, pixels: Tensor, masks: Tensor) -> Tensor:
        """The first target pixel that reads a source pixel of a mask or one after it."""
        targets: Tensor = first_target(pixels, self.numerator[masks], self.denominator[masks])
        return targets

    def seen(self) -> Tensor:
        """Number of target pixels that read the image, int64 [N]; those after them are background."""
        return self.firsts(self.source, torch.arange(len(self.source), device=self.source.device))


def framed_axes(
    source: Tensor, image_size: int, size: int, taken: Tensor | None
) -> tuple[TorchAxis, TorchAxis]:
    """Rows and columns of `rasterize_frame` for source sizes int64 [2, N]."""
    taken = framed_sizes(source.T, image_size) if taken is None else taken.to(source)
    rows, columns = (
        TorchAxis(source[i], size, image_size * source[i], 2 * size * taken[:, i]) for i in range(2)
    )
    return rows, columns


def sources(offsets: Tensor, height: Size, width: Size) -> Tensor:
    """Height and width of every mask's image, int64 [2, N], on the CPU."""
    count = offsets.numel() - 1
    sizes = []
    for name, value in (("source_height", height), ("source_width", width)):
        if isinstance(value, Tensor):
            if value.shape != (count,) or value.is_floating_point():
                raise BadValue(f"{name} must be an integer or integers [{count}], got {list(value.shape)}")
            sizes.append(value.to("cpu", torch.int64))
        else:
            sizes.append(torch.full((count,), value, dtype=torch.int64))
    both = torch.stack(sizes)
    if count:
        check_size(int(both.amin()), 1)
        check_size(int((both[0] * both[1]).amax()), 1)
    return both


def fill_axes(
    runs: Tensor,
    offsets: Tensor,
    rows: TorchAxis,
    columns: TorchAxis,
    *,
    flip: Flip,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    # A dense mask is filled in the order of the runs, down its columns, and then transposed. If several
    # target columns read the same source column, only the first of them is filled, and the others copy it.
    device = runs.device
    if runs.ndim != 1 or runs.is_floating_point() or offsets.dtype != torch.int64 or offsets.device != device:
        raise BadValue("runs must be integers [R] and offsets int64 [N + 1], on the same device")
    count, height, width = offsets.numel() - 1, rows.target, columns.target
    mirror = flips(flip, count, device)
    out = buffer((count, height, width), out, dtype, device)
    if count == 0:
        return out
    mask, most = masks_of(runs, offsets), height * width
    ends = first_pixels(runs, mask, rows, columns, height, mirror).clamp(0, most)
    number = torch.zeros((count, most + 1), dtype=torch.uint8, device=device)  # of ends; an odd one counts
    number.view(-1).index_add_(0, mask * (most + 1) + ends, number.new_ones(()).expand(len(runs)))
    filled = number.cumsum(1, dtype=torch.uint8)[:, :most].view(count, width, height)

    read, of_column = columns.reads(), torch.arange(count, device=device)[:, None]
    inside = (read < columns.source[:, None])[:, :, None] & (rows.reads() < rows.source[:, None])[:, None]
    read = torch.where(mirror[:, None], columns.source[:, None] - 1 - read, read)
    column = filled_column(columns, read, of_column, mirror).clamp(0, width - 1)
    pixels = filled[of_column, column].bitwise_and_(inside)
    return out.copy_(pixels.transpose(1, 2))


def masks_of(runs: Tensor, offsets: Tensor) -> Tensor:
    """The mask of each run, int64 [R]."""
    masks = torch.arange(offsets.numel() - 1, device=runs.device)
    return masks.repeat_interleave(offsets.diff(), output_size=len(runs))


def first_pixels(
    runs: Tensor, mask: Tensor, rows: TorchAxis, columns: TorchAxis, height: int | Tensor, mirror: Tensor
) -> Tensor:
    """For each run the first pixel of the dense mask that reads the source pixel at its end or a later one.

    Pixels are counted in the order of the runs, `height` to a column (an int, or int64 [N]), without columns
    that read the same source column as the one before.
    """
    sizes = rows.source * columns.source
    before = sizes.cumsum(0) - sizes  # pixels of all previous masks: sums of runs are cumulative over masks
    ends = runs.to(torch.int64).cumsum(0) - before[mask]
    source_column = ends // rows.source[mask]
    row = rows.firsts(ends - source_column * rows.source[mask], mask)
    column = filled_column(columns, source_column, mask, mirror)
    following = filled_column(columns, source_column + 1, mask, mirror)
    within = (column < following) & (row < rows.seen()[mask])
    stride = height[mask] if isinstance(height, Tensor) else height
    return torch.where(within, column * stride + row, following * stride)


def filled_column(columns: TorchAxis, source_column: Tensor, mask: Tensor, mirror: Tensor) -> Tensor:
    """The column, counted in the order of the runs, that is filled for a source column or a later one."""
    mirrored = columns.seen()[mask] - columns.firsts(columns.source[mask] - source_column, mask)
    return torch.where(mirror[mask], mirrored, columns.firsts(source_column, mask))


def flips(flip: Flip, count: int, device: torch.device) -> Tensor:
    """The flip of every mask, bool [N] on the device."""
    if not isinstance(flip, Tensor):
        return torch.full((count,), bool(flip), device=device)
    if flip.shape != (count,) or flip.dtype != torch.bool:
        raise BadValue(f"flip must be a bool or bool [{count}], got {flip.dtype} {list(flip.shape)}")
    return flip.to(device, non_blocking=device.type != "cpu")


def buffer(
    shape: tuple[int, int, int], out: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`out` if it fits, or a new tensor."""
    if out is None:
        if dtype not in DTYPES:
            raise BadValue(f"dtype must be torch.uint8, bool, bfloat16 or float32, got {dtype}")
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape:
        raise BadValue(f"out must have shape {list(shape)}, got {list(out.shape)}")
    if out.dtype not in DTYPES:
        raise BadValue(f"out must be uint8, bool, bfloat16 or float32, got {out.dtype}")
    if out.device != device or not out.is_contiguous():
        raise BadValue(f"out must be contiguous and on {device}")
    return out
