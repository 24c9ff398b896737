"""A JPEG into the padded square: decoded at the smallest sufficient scale, resized straight into its slot."""

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.masks.grid import framed_size
from sa1b.shards.annotation import MAX_IMAGE_PIXELS
from sa1b.shards.errors import BadSample

AREA_FACTOR = 4 / 3  # beyond this much reduction, bilinear sampling would skip pixels


def draw(data: bytes, height: int, width: int, slot: npt.NDArray[np.uint8], *, flip: bool = False) -> None:
    """Decode a JPEG into the top left of a square slot; the rest of the slot becomes 0.

    The decoder's DCT scales down to the smallest n/8 that is not below the target, then OpenCV resizes into
    the slot: bilinear, or over areas where more than 4/3 of reduction remain. Pixels at S x S lie where the
    padded frame of the masks says.

    Args:
        data: the JPEG as stored.
        height, width: pixels of the source image, which the masks belong to.
        slot: uint8 [S, S, 3], RGB.
        flip: mirror left and right, within the image's own width.

    Raises:
        BadSample: the file is no JPEG, or does not decode without a warning.
    """
    size = slot.shape[0]
    rows, columns = framed_size(height, width, size)
    try:
        # The header first: a decoder takes memory by what it says.
        stored_height, stored_width, *_ = simplejpeg.decode_jpeg_header(data)
        if stored_height * stored_width > MAX_IMAGE_PIXELS:
            raise BadSample("absurd_size", f"JPEG says {stored_width} x {stored_height} pixels")
        image = simplejpeg.decode_jpeg(data, "RGB", min_height=rows, min_width=columns, strict=True)
    except ValueError as error:
        raise BadSample("jpeg_broken", f"JPEG does not decode: {error}") from None
    target = slot[:rows, :columns]
    if flip:
        image = cv2.flip(image, 1)
    if image.shape == target.shape:
        target[:] = image
    else:
        small = image.shape[0] > AREA_FACTOR * rows or image.shape[1] > AREA_FACTOR * columns
        how = cv2.INTER_AREA if small else cv2.INTER_LINEAR
        cv2.resize(image, (columns, rows), dst=target, interpolation=how)
    slot[rows:] = 0
    slot[:rows, columns:] = 0
