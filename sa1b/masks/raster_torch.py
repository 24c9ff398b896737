"""Masks as pixels on any device, in plain torch, equal bit for bit to sa1b.masks.raster.

One call fills a batch of images of different sizes, without a loop over masks or runs. 64 masks of 2250x1500
on one CPU thread take 36 ms at 1024x1024, 1.7 ms at 256x256 (`pytest benchmarks/test_masks.py -k raster`).
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
    source = sources(offsets, source_height, source_width)
    rows = TorchAxis(source[0], height, source[0], torch.full_like(source[0], 2 * height))
    columns = TorchAxis(source[1], width, source[1], torch.full_like(source[1], 2 * width))
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
    source = sources(offsets, source_height, source_width)
    if taken is None:
        taken = framed_sizes(source.T, image_size)
    elif taken.shape != (source.shape[1], 2) or taken.is_floating_point():
        raise BadValue(f"taken must be integers [{source.shape[1]}, 2], got {list(taken.shape)}")
    taken = taken.to("cpu", torch.int64).T
    rows, columns = (
        TorchAxis(source[i], size, image_size * source[i], 2 * size * taken[i]) for i in range(2)
    )
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
    """Whether `rasterize_frame` sets no pixel of a mask, bool [N], from the runs. The host does not wait."""
    # A foreground run is a part of one column, or a part of its first column, all columns between and a part
    # of its last column. A part sets a pixel if target pixels read both its rows and its columns. The source
    # sizes are int64 [N] on the device of the runs.
    image_size, size = check_size(image_size, size)
    if len(runs) == 0:
        return torch.ones(offsets.numel() - 1, dtype=torch.bool, device=runs.device)
    source = torch.stack((source_height, source_width))
    taken = framed_sizes(source.T, image_size).T if taken is None else taken.T
    rows, columns = (
        TorchAxis(source[i], size, image_size * source[i], 2 * size * taken[i]) for i in range(2)
    )
    lengths = runs.to(torch.int64)
    ends = lengths.cumsum(0)
    number = torch.arange(len(runs), device=runs.device)
    masks = torch.arange(len(source_height), device=runs.device)
    mask = masks.repeat_interleave(offsets.diff(), output_size=len(runs))
    filled = ((number - offsets[mask]) % 2 == 1) & (lengths > 0)
    # Positions in the mask's image: the runs of a mask add up to the pixels of its image.
    pixels = source_height * source_width
    starts = ends - lengths - (pixels.cumsum(0) - pixels)[mask]
    height = source_height[mask]
    first, last = starts // height, (starts + lengths - 1) // height
    top, bottom = starts - first * height, starts + lengths - last * height

    def some(axis: TorchAxis, low: Tensor, high: Tensor) -> Tensor:
        """Whether any target pixel reads a source pixel low <= s < high."""
        return axis.firsts(low, mask) < axis.firsts(high, mask)

    single = first == last
    seen = some(rows, top, torch.where(single, bottom, height)) & some(columns, first, first + 1)
    seen |= ~single & some(rows, torch.zeros_like(top), bottom) & some(columns, last, last + 1)
    seen |= (first + 1 < last) & some(rows, torch.zeros_like(top), height) & some(columns, first + 1, last)
    return torch.zeros_like(masks).index_add_(0, mask, (filled & seen).long()) == 0


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

    def repeats(self) -> int:
        """The largest number of target pixels that read the same source pixel."""
        return int((self.denominator / (2 * self.numerator)).ceil().amax())

    def to(self, device: torch.device) -> "TorchAxis":
        tensors = torch.stack((self.source, self.numerator, self.denominator))
        source, numerator, denominator = tensors.to(device, non_blocking=True)
        return TorchAxis(source, self.target, numerator, denominator)

    def firsts(self, pixels: Tensor, masks: Tensor) -> Tensor:
        """The first target pixel that reads a source pixel of a mask or one after it."""
        targets: Tensor = first_target(pixels, self.numerator[masks], self.denominator[masks])
        return targets


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
    """Mark each pixel that differs from the one above it by +1 or -1, then sum down the columns."""
    # Sums are taken over words of eight pixels: every byte of every sum is 0 or 1, so the carries that -1
    # causes in a word cancel out.
    device = runs.device
    if runs.ndim != 1 or runs.is_floating_point() or offsets.dtype != torch.int64 or offsets.device != device:
        raise BadValue("runs must be integers [R] and offsets int64 [N + 1], on the same device")
    count, height, width = offsets.numel() - 1, rows.target, columns.target
    mirror = flips(flip, count, device)
    out = buffer((count, height, width), out, dtype, device)
    if count == 0:
        return out
    whole = out.element_size() == 1 and width % 8 == 0 and out.data_ptr() % 8 == 0
    if whole:
        words = out.view(torch.int64).zero_()
    else:
        words = torch.zeros((count, height, -(-width // 8)), dtype=torch.int64, device=device)
    repeats = columns.repeats()
    padded = bool((rows.firsts(rows.source, torch.arange(count)) < height).any())
    rows, columns = rows.to(device), columns.to(device)

    lengths = runs.to(torch.int64)
    ends = lengths.cumsum(0)
    masks = torch.arange(count, device=device)
    mask_of = masks.repeat_interleave(offsets.diff(), output_size=len(runs))
    sizes = rows.source * columns.source
    before = sizes.cumsum(0) - sizes  # pixels of all previous masks: `ends` is cumulative over masks

    # Inside a column: at the row where a run begins, in every target column that reads this column.
    begins = ends - lengths - before[mask_of]
    source_column = begins // rows.source[mask_of]
    source_row = begins - source_column * rows.source[mask_of]
    inside = (source_row > 0) & (source_column < columns.source[mask_of])
    source_column = torch.where(mirror[mask_of], columns.source[mask_of] - 1 - source_column, source_column)
    first = columns.firsts(source_column, mask_of)
    stop = columns.firsts(source_column + 1, mask_of)
    row = rows.firsts(source_row, mask_of)
    column = first[:, None] + torch.arange(repeats, device=device)
    inside = (inside & (row < height))[:, None] & (column < stop[:, None])
    odd = (torch.arange(len(runs), device=device) - offsets[mask_of]) % 2  # 1: foreground begins
    change(words, mask_of[:, None], row[:, None], column, torch.where(inside, 2 * odd[:, None] - 1, 0))

    # At the top of a column: whether its first pixel is foreground. At the end of the image: whether the last
    # is.
    column = torch.arange(width, device=device)
    read = source_pixel(column, columns.numerator[:, None], columns.denominator[:, None])
    seen = read < columns.source[:, None]
    read = torch.where(mirror[:, None] & seen, columns.source[:, None] - 1 - read, read)
    top = before[:, None] + read * rows.source[:, None]
    change(
        words, masks[:, None], torch.zeros_like(top), column, (seen & foreground(ends, offsets, top)).long()
    )
    if padded:
        bottom = rows.firsts(rows.source, masks)[:, None]
        last = foreground(ends, offsets, top + rows.source[:, None] - 1)
        change(words, masks[:, None], bottom, column, -(seen & last & (bottom < height)).long())

    torch.cumsum(words, 1, out=words)
    if not whole:
        out.copy_(words.view(torch.uint8)[:, :, :width])
    return out


def change(words: Tensor, mask: Tensor, row: Tensor, column: Tensor, by: Tensor) -> None:
    """Add `by` (-1, 0 or 1) to the pixels [mask, row, column]; pixels outside are not changed."""
    _, height, width = words.shape
    word = torch.where(by != 0, (mask * height + row) * width + column // 8, 0)
    words.view(-1).index_add_(0, word.view(-1), (by << (column % 8 * 8)).expand_as(word).reshape(-1))


def foreground(ends: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    """Whether the pixels of each mask at these positions [N, P], counted over all masks, are foreground."""
    run = torch.searchsorted(ends, positions, right=True)
    return (run - offsets[:-1, None]) % 2 == 1


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
