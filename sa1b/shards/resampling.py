"""Resampling of images by exact edges, which may lie between pixels.

A window of an image is resized so that its edges become the edges of the result, however they lie to the
pixels of the image: target pixel d has its centre at start + (d + 0.5) * (stop - start) / count. This is the
rule by which masks are resized (sa1b.masks.grid), so an image and its masks stay aligned. Edges lie between
pixels where the decoder's DCT has scaled a file down: 2250 pixels at 2/8 are 562.5, in 563 columns.
"""

import threading
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Edges = tuple[float, float, float, float]

_STEP = 4 / 3  # pixels; with larger steps between values, bilinear interpolation would skip pixels
_THREAD = threading.local()


def resample(image: Pixels, edges: Edges, rows: int, columns: int, target: Pixels | None = None) -> Pixels:
    """A window of an image, resized: uint8 [rows, columns, 3].

    Interpolates bilinearly. Where the window is reduced by more than 4/3, each pixel is the mean of n x m
    such values, which are at most 4/3 pixels apart. This takes half the time of OpenCV's INTER_AREA. A window
    whose top left corner is the corner of a pixel takes a third of the time of another one.

    Args:
        image: uint8 [height, width, 3].
        edges: top, bottom, left and right edge of the window, in pixels of the image. The last row and
            column of pixels may lie partly outside of it.
        target: uint8 [rows, columns, 3], for the result; not used if the image has these pixels already.

    Raises:
        MemoryError: no memory for the pixels.
    """
    top, bottom, left, right = edges
    n, m = ceil((bottom - top) / rows / _STEP), ceil((right - left) / columns / _STEP)
    try:
        if n == m == 1:
            return _interpolated(image, edges, rows, columns, target)
        made = _interpolated(image, edges, n * rows, m * columns, scratch("resample", n * rows, m * columns))
        return np.asarray(
            cv2.resize(made, (columns, rows), dst=target, interpolation=cv2.INTER_AREA), np.uint8
        )
    except cv2.error as error:  # pixels and sizes are valid: memory is lacking
        raise MemoryError(str(error)) from None


def scratch(purpose: str, height: int, width: int) -> Pixels:
    """A reused buffer of this thread, [height, width, 3]: new memory costs a page fault every 4 kB."""
    size = 3 * height * width
    buffer: Pixels | None = getattr(_THREAD, purpose, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_THREAD, purpose, buffer)
    return buffer[:size].reshape(height, width, 3)


def _interpolated(image: Pixels, edges: Edges, rows: int, columns: int, target: Pixels | None) -> Pixels:
    top, bottom, left, right = edges
    down, across = rows / (bottom - top), columns / (right - left)
    part = image[int(top) : ceil(bottom), int(left) : ceil(right)]
    height, width = part.shape[:2]
    starts_whole = top % 1 == left % 1 == 0
    if starts_whole and down == across == 1:
        return part
    size = round(height * down), round(width * across)
    if starts_whole and size != (height, width):  # OpenCV would copy an image of the same size
        # By a size instead of factors, pixels that lie partly outside would count as whole ones.
        made = cv2.resize(part, None, dst=target, fx=across, fy=down, interpolation=cv2.INTER_LINEAR)
        return np.asarray(made if size == (rows, columns) else made[:rows, :columns], np.uint8)
    # This maps the centre of a target pixel to the image.
    matrix = np.array([[1 / across, 0, left + 0.5 / across - 0.5], [0, 1 / down, top + 0.5 / down - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    edge = cv2.BORDER_REPLICATE
    made = cv2.warpAffine(image, matrix, (columns, rows), dst=target, flags=how, borderMode=edge)
    return np.asarray(made, np.uint8)
