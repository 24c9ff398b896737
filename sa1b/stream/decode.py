"""Decoders: JPEG files into images of the padded square, in the memory of a batch.

A decoder is an object with the interface of `Decoder`; `decoder(name)` creates one. Streams and loaders use
nothing else, so a new back end is a class and an entry in DECODERS:

    cpu           simplejpeg (libjpeg-turbo) and OpenCV, one image per thread
    torchcodec    nvJPEG, a micro-batch at a time, on the GPU; see sa1b.stream.gpu_decoder
    nvimgcodec    the same, by another library
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
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


@cache  # one for all streams of a process: its CUDA streams must be few
def _gpu_decoder(name: str) -> Decoder:
    from sa1b.stream.gpu_decoder import GpuDecoder  # it decodes on the CPU what a GPU cannot decode
    from sa1b.stream.jpeg_libraries import LIBRARIES

    return GpuDecoder(name, LIBRARIES[name]())


DECODERS: dict[str, Callable[[], Decoder]] = {
    "cpu": CpuDecoder,
    "torchcodec": partial(_gpu_decoder, "torchcodec"),
    "nvimgcodec": partial(_gpu_decoder, "nvimgcodec"),
}
DECODES = ("auto", "cpu", "gpu")  # choices of sa1b.Loader(decode=)


def decoder(name: str) -> Decoder:
    """A decoder by its name, one of DECODERS; for a GPU, the same one for all streams of the process.

    Raises:
        ValueError: no decoder has this name, or the library that it needs is not installed.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r} must be one of {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]()


def decoder_for(decode: str, current: Decoder, name: str) -> str:
    """The name of the decoder of a loader.

    Args:
        decode: "cpu"; "gpu": the stream's decoder if it decodes on a GPU, else the first library of
            sa1b.stream.jpeg_libraries that is installed; "auto": the stream's decoder. On a GPU no rate has
            been measured yet, so "auto" never replaces a decoder.
        current, name: the stream's decoder.

    Raises:
        ValueError: `decode` is not one of DECODES, or no library for the GPU is installed.
    """
    if decode not in DECODES:
        raise ValueError(f"decode={decode!r} must be one of {', '.join(map(repr, DECODES))}")
    if decode == "gpu" and current.device.type == "cpu":
        from sa1b.stream.jpeg_libraries import installed

        return installed()
    return "cpu" if decode == "cpu" else name


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
    edges, whole = window_edges(frame, stored, 8 * max(image.shape) // max(stored))
    top, bottom, left, right = edges
    if whole:
        part = image[round(top) : round(bottom), round(left) : round(right)]
        if part.shape[:2] == (rows, columns):
            return part
        small = part.shape[0] > AREA_FACTOR * rows or part.shape[1] > AREA_FACTOR * columns
        how = cv2.INTER_AREA if small else cv2.INTER_LINEAR
        return cv2.resize(part, (columns, rows), dst=target, interpolation=how)
    # This maps the centre of a target pixel to the decoded image.
    down, across = (bottom - top) / rows, (right - left) / columns  # decoded pixels per target pixel
    matrix = np.array([[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(
        image, matrix, (columns, rows), dst=target, flags=how, borderMode=cv2.BORDER_REPLICATE
    )


def window_edges(frame: Frame, stored: tuple[int, int], eighths: int = 8) -> tuple[list[float], bool]:
    """The top, bottom, left and right edge of a frame's window in a decoded image, in its pixels.

    Edges may be between pixels: a stored image may be smaller than its source, and the last row and column of
    an image decoded at n/8 may be padded.

    Args:
        stored: height and width of the image in the file, in pixels.
        eighths: scale of the decoded image, in eighths of the stored one.

    Returns:
        The edges, and whether the whole pixels next to them are exact to within half a pixel of the square.
    """
    rows, columns = frame.taken
    x, y, width, height = frame.window
    edges = np.array([y, y + height, x, x + width]) * np.repeat(stored, 2) * eighths
    edges = edges / np.repeat([8 * frame.height, 8 * frame.width], 2)
    top, bottom, left, right = edges.tolist()
    down, across = (bottom - top) / rows, (right - left) / columns  # decoded pixels per target pixel
    shifts = np.abs(edges - edges.round()) / [down, down, across, across]
    return [top, bottom, left, right], bool(shifts.max() <= 0.5)


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    """A reused buffer of this thread: fresh memory from the system costs a page fault every 4 kB."""
    buffer: npt.NDArray[np.uint8] | None = getattr(_THREAD, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _THREAD.buffer = np.empty(size, np.uint8)
    return buffer
