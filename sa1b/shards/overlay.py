"""Images with their masks drawn over them, at display size: for notebooks, viewers and the gallery.

Masks are resized on their runs to the pixels of the displayed image (`sa1b.masks.raster.rasterize`), so that
a contour is the exact edge of the mask at that size. Larger masks are drawn first and smaller ones over them.
The colour of a mask depends on its number in that order, and is the same in the gallery.

One mask is in memory at a time, and a JPEG is decoded at a fraction of its size where it is larger than what
is displayed, so that memory grows with the displayed pixels only.
"""

import colorsys

import cv2
import numpy as np
import numpy.typing as npt

from sa1b.masks import geometry, raster
from sa1b.masks.runs import Runs
from sa1b.shards import jpeg
from sa1b.shards.resampling import resample

Pixels = npt.NDArray[np.uint8]

_OPACITY = 0.4  # opacity of a mask's colour; its contour is opaque
_CROSS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.uint8)  # a pixel and its four neighbours


def largest_first(runs: Runs) -> npt.NDArray[np.int64]:
    """Mask indices by area in pixels, largest first, int64 [N]: the order of drawing."""
    return np.argsort(-geometry.area(runs), kind="stable").astype(np.int64)


def display_size(height: int, width: int, longer_side: int) -> tuple[int, int]:
    """Height and width of the displayed image: reduced if the longer side exceeds a limit."""
    if max(height, width) <= longer_side:
        return height, width
    return jpeg.scaled_size(height, width, longer_side)


def scaled(pixels: Pixels, longer_side: int) -> Pixels:
    """An RGB image at its `display_size`, uint8 [h, w, 3]."""
    height, width = pixels.shape[:2]
    return resample(pixels, (0, height, 0, width), *display_size(height, width, longer_side))


def decode_for_display(data: bytes, longer_side: int) -> Pixels:
    """Decode a JPEG at its `display_size`: RGB uint8 [h, w, 3].

    The decoder's DCT scales down first: memory and time grow with the displayed pixels, not with those of the
    file, up to a reduction of 8.

    Raises:
        BadSample: not a JPEG, an absurd size, or a decoder error.
    """
    found = jpeg.frame(data)
    stored = found.height, found.width
    size = display_size(*stored, longer_side)
    pixels, eighths = jpeg.decode_scaled(data, stored, size)
    height, width = (side * eighths / 8 for side in stored)
    return resample(pixels, (0, height, 0, width), *size)


def overlay(pixels: Pixels, runs: Runs) -> Pixels:
    """A copy of an image with masks drawn over it.

    Args:
        pixels: the image, RGB uint8 [h, w, 3], at any size.
        runs: N masks, of the source image at any size; they are resized to h x w. One dense mask is in memory
            at a time.

    Returns:
        RGB uint8 [h, w, 3]: each pixel tinted in the colour of the smallest mask that covers it, with
        contours of one pixel inside the masks.
    """
    height, width = pixels.shape[:2]
    top = np.zeros((height, width), np.int32)  # number, from 1, of the last mask drawn at each pixel
    contour = np.zeros((height, width), np.bool_)
    buffer = np.empty((1, height, width), np.uint8)
    for number, mask in enumerate(largest_first(runs).tolist(), 1):
        (found,) = raster.rasterize(runs, height, width, select=[mask], out=buffer)
        inside = found.view(np.bool_)
        top[inside] = number
        # A mask hides the contours of the masks below it.
        contour[inside] = (found != cv2.erode(found, _CROSS))[inside]
    colours = np.array([(0.0, 0.0, 0.0), *map(colour, range(len(runs)))], np.float32)
    share = np.where(contour, 1.0, np.where(top > 0, _OPACITY, 0.0)).astype(np.float32)[:, :, None]
    mixed = pixels * (1 - share) + colours[top] * share
    return np.rint(mixed).astype(np.uint8)


def colour(number: int) -> tuple[float, float, float]:
    """RGB, 0 to 255, of mask `number` in the order of drawing: hues at golden angles, as in the gallery."""
    hue = (number * 137.508 + 20) % 360 / 360
    red, green, blue = colorsys.hls_to_rgb(hue, 0.58, 0.85)
    return 255 * red, 255 * green, 255 * blue
