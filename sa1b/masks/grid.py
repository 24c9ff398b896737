"""The rule for the source pixel that a target pixel reads, along one axis, for all back ends.

Target pixel d reads source pixel ((2 * d + 1) * numerator) // denominator, the pixel at its centre. The
arithmetic is in integers, so that every back end reads the same pixel. Pixels beyond the last source pixel
are background.

To resize an axis of n pixels to m, the numerator is n and the denominator 2 * m. The frame is a square of
S = image_size pixels with the resized image at its top left (L is the longer side of the image):

    len_S = max(1, (2 * len * S + L) // (2 * L))            pixels of the S that an axis of len covers
    src   = ((2 * dst + 1) * S * len) // (2 * size * len_S)  for a dense mask of the frame at `size`

So a mask at 256 covers exactly the part of the frame that the image covers at 1024. For an image that is
stretched, or scaled by a transform, the caller passes other values of len_S (`taken`).

Points and boxes are in pixels of the square, x right and y down; the centre of pixel i is at i + 0.5. A point
is the centre of a source pixel: source pixel x is at (x + 0.5) * len_S / len. A box is x0, y0, x1, y1, the
centres of the first and the last column and row of its mask, so that width and height are those of SA-1B,
last minus first pixel. The published model has the same convention (`batched_mask_to_box`; its prompt encoder
adds 0.5 to points and box corners). Prompts of sa1b.sam, where a pixel's centre has an integer index, are
these coordinates minus 0.5.

This module implements the rule for numpy and the compiled kernels, sa1b.masks.raster_torch for torch and
Triton.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks.runs import check_size


@dataclass(frozen=True, slots=True)
class Axis:
    """The mapping of `target` pixels to `source` pixels along one axis; the fraction is reduced."""

    source: int
    target: int
    numerator: int
    denominator: int

    def sources(self) -> npt.NDArray[np.int64]:
        """The source pixel that each target pixel reads, int64 [target]; -1 for background."""
        centres = 2 * np.arange(self.target, dtype=np.int64) + 1
        sources = centres * self.numerator // self.denominator
        return np.where(sources < self.source, sources, -1)


@lru_cache(maxsize=128)
def firsts(axis: Axis) -> npt.NDArray[np.int64]:
    """Number of target pixels that read a source pixel before each one, int64 [source + 1], read-only."""
    sources = np.arange(axis.source + 1, dtype=np.int64)
    table = -(-sources * axis.denominator // axis.numerator) // 2
    table.flags.writeable = False
    return table


def axis(source: int, target: int, numerator: int, denominator: int) -> Axis:
    """The axis with a reduced fraction. Raises ValueError if products would overflow int64."""
    divisor = gcd(numerator, denominator)
    numerator, denominator = numerator // divisor, denominator // divisor
    if max((2 * target + 1) * numerator, (source + 1) * denominator) >= 2**63:
        raise BadValue(f"{source} pixels to {target}: too large for int64; use smaller sizes")
    return Axis(source, target, numerator, denominator)


def resized(source: tuple[int, int], target: tuple[int, int]) -> tuple[Axis, Axis]:
    """The axes (rows, columns) of an image resized from source (height, width) to target (height, width)."""
    source, target = check_size(*source), check_size(*target)
    rows, columns = (axis(s, t, s, 2 * t) for s, t in zip(source, target, strict=True))
    return rows, columns


def scaled_side(side: int, longer: int, longer_scaled: int) -> int:
    """Pixels of one side after the image's longer side is scaled to `longer_scaled`, rounded."""
    return max(1, (2 * side * longer_scaled + longer) // (2 * longer))


def framed_size(height: int, width: int, image_size: int) -> tuple[int, int]:
    """Rows and columns of the padded square of image_size pixels that an image covers.

    The longer side has image_size; the shorter one is rounded to the nearest pixel and is at least 1.

    Raises:
        SizeError: height and width, or image_size, are not valid image sizes.
    """
    height, width = check_size(height, width)
    image_size, _ = check_size(image_size, image_size)
    longer = max(height, width)
    return scaled_side(height, longer, image_size), scaled_side(width, longer, image_size)


def framed(
    source: tuple[int, int], image_size: int, size: int, taken: tuple[int, int] | None = None
) -> tuple[Axis, Axis]:
    """The axes (rows, columns) of the padded square of image_size pixels, rasterised at size x size.

    `taken`: rows and columns of the square that the image covers; by default its `framed_size`. ValueError if
    they do not fit.
    """
    size, _ = check_size(size, size)
    if taken is None:
        taken = framed_size(*source, image_size)
    elif not 1 <= min(taken) <= max(taken) <= image_size:
        raise BadValue(f"taken={taken} must fit into the square of {image_size} pixels")
    rows, columns = (
        axis(int(n), size, int(image_size) * int(n), 2 * size * n_taken)
        for n, n_taken in zip(source, taken, strict=True)
    )
    return rows, columns
