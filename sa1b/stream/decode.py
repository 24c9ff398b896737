"""Decoders: JPEG files into images of the padded square, in the memory of a batch.

A decoder is an object with the interface of `Decoder`; `decoder(name)` creates one. Streams and loaders use
nothing else, so a new back end is a class and an entry in DECODERS:

    class NvjpegDecoder:
        device = torch.device("cuda")
        batched = True

        def decode(self, images, out): ...
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor

from sa1b.errors import BadSample
from sa1b.shards.limits import MAX_STORED_PIXELS
from sa1b.stream.transform import Frame

_THREAD = threading.local()

Image = npt.NDArray[Any]
AREA_FACTOR = 4 / 3  # at larger reductions, bilinear interpolation would skip pixels


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image to decode.

    Attributes:
        jpeg: the stored file. It may have fewer pixels than the source image, whose pixels the frame uses.
        frame: which part of the image to decode, its size in the square, and whether it is mirrored.
    """

    jpeg: bytes | memoryview
    frame: Frame


class Decoder(Protocol):
    """Interface of a decoder; implementations need not derive from it.

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

        The window of the frame fills the top left `Frame.taken` rows and columns of the image's square. If
        the frame is mirrored, the pixels are mirrored; then `Frame.pixels` is applied. All other pixels are
        set to 0. The same file and frame give the same pixels in any thread and in any batch. A damaged JPEG,
        or a JPEG that causes a decoder warning, does not affect other images: its BadSample is returned, not
        raised, and the contents of its square are undefined.

        Args:
            images: n JPEG files in host memory.
            out: uint8 [n, S, S, 3], RGB, contiguous, on `device`. On a GPU the work is submitted to the
                current stream and need not be finished on return.

        Returns:
            For each image None, or the reason why it cannot be decoded.

        Raises:
            Exception: the error, such as MemoryError, is not caused by a file; reading stops.
        """
        ...


class CpuDecoder:
    """simplejpeg (libjpeg-turbo) and OpenCV, one image at a time in the calling thread.

    Creating an instance limits OpenCV to one thread in the whole process, because the threads of a loader or
    the workers of a DataLoader already use all CPUs.
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
                decode(image.jpeg, image.frame, buffer)
                errors.append(None)
            except BadSample as error:
                errors.append(error)
        return errors


DECODERS: dict[str, Callable[[], Decoder]] = {"cpu": CpuDecoder}


def decoder(name: str) -> Decoder:
    """A decoder by its name, one of DECODERS.

    Raises:
        ValueError: no decoder has this name.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r} must be one of {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]()


def decode(data: bytes | memoryview, frame: Frame, buffer: npt.NDArray[np.uint8]) -> None:
    """Decode a JPEG into the top left of a square buffer; the rest of the buffer becomes 0.

    The decoder's DCT scales down to the smallest n/8 that is not below the target. OpenCV then resizes into
    the buffer, with bilinear interpolation, or with area interpolation if a reduction of more than 4/3
    remains. Pixels at S x S are aligned with the frame of the masks to within half a pixel.

    Args:
        data: the stored JPEG.
        frame: position and size of the image in the square.
        buffer: uint8 [S, S, 3], RGB.

    Raises:
        BadSample: the file is not a JPEG, or decoding it fails or causes a warning.
    """
    size = buffer.shape[0]
    rows, columns = frame.taken
    _, _, width, height = frame.window
    target = buffer[:rows, :columns]
    try:
        # Check the header first: the decoder allocates memory according to it.
        stored = simplejpeg.decode_jpeg_header(data)[:2]
        if stored[0] * stored[1] > MAX_STORED_PIXELS:
            raise BadSample("absurd_size", f"JPEG says {stored[1]} x {stored[0]} pixels")
        # A stored image of the right size and the buffer's full width is decoded directly into the buffer.
        in_place = stored == (rows, size) and columns == size and frame.is_whole and not frame.flip
        into = buffer if in_place else _scratch(3 * stored[0] * stored[1])
        image = simplejpeg.decode_jpeg(
            data,
            "RGB",
            min_height=-(-rows * frame.height // height),
            min_width=-(-columns * frame.width // width),
            buffer=into,
            strict=True,
        )
    except BadSample:
        raise
    except ValueError as error:
        raise BadSample("jpeg_broken", f"JPEG does not decode: {error}") from None
    if not in_place:
        image = _resized(image, stored, frame, None if frame.flip else target)
        if frame.flip:
            cv2.flip(image, 1, dst=target)
        elif image is not target:
            target[:] = image
    if frame.pixels is not None:
        target[:] = frame.pixels(target.copy())
    buffer[rows:] = 0
    buffer[:rows, columns:] = 0


def _resized(image: Image, stored: tuple[int, int], frame: Frame, target: Image | None) -> Image:
    """The frame's window of a decoded image as [rows, columns, 3]; in `target` if it has to be resized.

    The result is exact to within half a pixel of the square. Resizing whole pixels takes a third of the time
    of an exact shift.

    Args:
        stored: height and width of the image in the file, in pixels.
    """
    rows, columns = frame.taken
    x, y, width, height = frame.window
    # The window's edges in the decoded image. They may be between pixels: a stored image may be smaller than
    # its source, and the last row and column of an image decoded at n/8 may be padded.
    eighths = 8 * max(image.shape) // max(stored)
    edges = np.array([y, y + height, x, x + width]) * np.repeat(stored, 2) * eighths
    edges = edges / np.repeat([8 * frame.height, 8 * frame.width], 2)
    top, bottom, left, right = edges.tolist()
    down, across = (bottom - top) / rows, (right - left) / columns  # decoded pixels per target pixel
    shifts = np.abs(edges - edges.round()) / [down, down, across, across]
    if shifts.max() <= 0.5:
        part = image[round(top) : round(bottom), round(left) : round(right)]
        if part.shape[:2] == (rows, columns):
            return part
        small = part.shape[0] > AREA_FACTOR * rows or part.shape[1] > AREA_FACTOR * columns
        how = cv2.INTER_AREA if small else cv2.INTER_LINEAR
        return cv2.resize(part, (columns, rows), dst=target, interpolation=how)
    # This maps the centre of a target pixel to the decoded image.
    matrix = np.array([[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(
        image, matrix, (columns, rows), dst=target, flags=how, borderMode=cv2.BORDER_REPLICATE
    )


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    """A reused buffer of this thread: fresh memory from the system costs a page fault every 4 kB."""
    buffer: npt.NDArray[np.uint8] | None = getattr(_THREAD, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _THREAD.buffer = np.empty(size, np.uint8)
    return buffer
