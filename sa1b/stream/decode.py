"""A JPEG into the padded square: decoded at the smallest sufficient scale, resized into its buffer."""

import threading

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.errors import BadSample
from sa1b.masks.grid import framed_size
from sa1b.shards.annotation import MAX_STORED_PIXELS

_THREAD = threading.local()
AREA_FACTOR = 4 / 3  # beyond this much reduction, bilinear sampling would skip pixels


def decode(
    data: bytes | memoryview, height: int, width: int, buffer: npt.NDArray[np.uint8], *, flip: bool = False
) -> None:
    """Decode a JPEG into the top left of a square buffer; the rest of the buffer becomes 0.

    The decoder's DCT scales down to the smallest n/8 that is not below the target, then OpenCV resizes into
    the buffer: bilinear, or over areas where more than 4/3 of reduction remain. Pixels at S x S lie where the
    padded frame of the masks says.

    Args:
        data: the JPEG as stored.
        height, width: pixels of the source image, which the masks belong to.
        buffer: uint8 [S, S, 3], RGB.
        flip: mirror left and right, within the image's own width.

    Raises:
        BadSample: the file is no JPEG, or does not decode without a warning.
    """
    size = buffer.shape[0]
    rows, columns = framed_size(height, width, size)
    target = buffer[:rows, :columns]
    try:
        # The header first: a decoder takes memory by what it says.
        stored = simplejpeg.decode_jpeg_header(data)[:2]
        if stored[0] * stored[1] > MAX_STORED_PIXELS:
            raise BadSample("absurd_size", f"JPEG says {stored[1]} x {stored[0]} pixels")
        # A stored image of the right size and the buffer's whole width is decoded where it belongs.
        in_place = stored == (rows, size) and columns == size and not flip
        into = buffer if in_place else _scratch(3 * stored[0] * stored[1])
        image = simplejpeg.decode_jpeg(
            data, "RGB", min_height=rows, min_width=columns, buffer=into, strict=True
        )
    except BadSample:
        raise
    except ValueError as error:
        raise BadSample("jpeg_broken", f"JPEG does not decode: {error}") from None
    if not in_place:
        if image.shape != target.shape:
            small = image.shape[0] > AREA_FACTOR * rows or image.shape[1] > AREA_FACTOR * columns
            how = cv2.INTER_AREA if small else cv2.INTER_LINEAR
            image = cv2.resize(image, (columns, rows), dst=None if flip else target, interpolation=how)
        if flip:
            cv2.flip(image, 1, dst=target)
        elif image is not target:
            target[:] = image
    buffer[rows:] = 0
    buffer[:rows, columns:] = 0


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    """A buffer of this thread: memory fresh from the system costs a page fault every 4 kB."""
    buffer: npt.NDArray[np.uint8] | None = getattr(_THREAD, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _THREAD.buffer = np.empty(size, np.uint8)
    return buffer
