"""Decoders: JPEG files into images of the padded square, in the memory of a batch.

A decoder is an object with the interface of `Decoder`; `decoder(name)` makes it. Streams and loaders
know nothing else of one, so a new back end is a class and an entry in DECODERS:

    class NvjpegDecoder:
        device = torch.device("cuda")
        batched = True

        def decode(self, images, out): ...
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor

from sa1b.errors import BadSample
from sa1b.masks.grid import framed_size
from sa1b.shards.annotation import MAX_STORED_PIXELS

_THREAD = threading.local()

AREA_FACTOR = 4 / 3  # beyond this much reduction, bilinear sampling would skip pixels


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image to decode.

    Attributes:
        jpeg: the file as stored.
        height, width: pixels of the source image, which the masks belong to.
        flip: mirror left and right, within the image's own width.
    """

    jpeg: bytes | memoryview
    height: int
    width: int
    flip: bool = False


class Decoder(Protocol):
    """What a decoder guarantees; implementations need not derive from it.

    Attributes:
        device: where `decode` writes images: "cpu", or the GPU that the loader copies to.
        batched: whether one call decodes a whole micro-batch. Otherwise the loader calls `decode` for one
            image at a time, from all its threads at once.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def batched(self) -> bool: ...

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        """Decode n images.

        An image takes the top left of its square, as many rows and columns as `sa1b.masks.grid.framed_size`
        says; all other pixels become 0, whatever was there before. The same file gives the same pixels in any
        thread and in any batch. A JPEG that is damaged in any way, a decoder's warning included, damages its
        own image only: its BadSample is returned, not raised, and its square may contain anything.

        Args:
            images: n files; they lie in ordinary memory.
            out: uint8 [n, S, S, 3], RGB, contiguous, on `device`. On a GPU the work is submitted to the
                current stream and need not be finished on return.

        Returns:
            For each image None, or why it does not decode.

        Raises:
            Whatever is no fault of a file, such as MemoryError: reading stops.
        """
        ...


class CpuDecoder:
    """simplejpeg (libjpeg-turbo) and OpenCV, one image at a time in the calling thread.

    Making one limits OpenCV to one thread in this process, and its users' process too: the threads of a
    loader and the workers of a DataLoader are as many as there are CPUs already.
    """

    device = torch.device("cpu")
    batched = False

    def __init__(self) -> None:
        cv2.setNumThreads(1)

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        """See `Decoder`."""
        errors: list[BadSample | None] = []
        for image, buffer in zip(images, out.numpy(), strict=True):
            try:
                decode(image.jpeg, image.height, image.width, buffer, flip=image.flip)
                errors.append(None)
            except BadSample as error:
                errors.append(error)
        return errors


DECODERS: dict[str, Callable[[], Decoder]] = {"cpu": CpuDecoder}


def decoder(name: str) -> Decoder:
    """A decoder by its name, one of DECODERS.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder is {name!r}; known are {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]()


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
