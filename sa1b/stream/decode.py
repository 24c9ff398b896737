"""JPEG files into images of the padded square, in the memory of a batch; on a GPU: sa1b.stream.decoders."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample, interpolate

from sa1b.errors import BadSample
from sa1b.shards import MAX_STORED_PIXELS, jpeg
from sa1b.shards.jpeg import Edges, resample, scratch
from sa1b.stream.transform import Frame

Window = tuple[int, int, int, int]  # x, y, width, height in pixels of the source image


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image to decode: which part of it, its size in the square, and whether it is mirrored. The stored
    file may have fewer pixels than the source image, whose pixels the frame uses.
    """

    jpeg: bytes | memoryview
    frame: Frame


class CpuDecoder:
    """simplejpeg (libjpeg-turbo) and OpenCV, one image at a time in the calling thread.

    Creating an instance limits OpenCV to one thread in the whole process, because the threads of a loader or
    the workers of a DataLoader already use all CPUs.
    """

    device = torch.device("cpu")  # where `decode` writes images
    batched = False  # whether one call decodes a whole micro-batch

    def __init__(self) -> None:
        cv2.setNumThreads(1)

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        """Decode n images into `out`, uint8 [n, S, S, 3], RGB: of each, the window of its frame at the top
        left, mirrored and changed by `Frame.pixels`, and 0 elsewhere; the same in any thread and batch.
        For each, it returns None, or why it cannot be decoded; then its square is undefined.
        """
        errors: list[BadSample | None] = []
        for image, buffer in zip(images, out.numpy(), strict=True):
            try:
                decode(image.jpeg, image.frame, buffer)
                errors.append(None)
            except BadSample as error:
                errors.append(error)
        return errors


def decode(data: bytes | memoryview, frame: Frame, buffer: npt.NDArray[np.uint8]) -> None:
    """Decode a JPEG into the top left of `buffer`, uint8 [S, S, 3], RGB; the rest of the buffer becomes 0."""
    # The decoder's DCT scales down first (`sa1b.shards.jpeg.decode_scaled`). Then the window is resampled by
    # its exact edges, so that the image is aligned with its masks.
    try:
        # Check the header first: the decoder allocates memory according to it.
        stored = simplejpeg.decode_jpeg_header(data)[:2]
    except ValueError as error:
        raise jpeg.decoder_error(error) from None
    if stored[0] * stored[1] > MAX_STORED_PIXELS:
        raise BadSample("absurd_size", f"JPEG says {stored[1]} x {stored[0]} pixels")
    # What is cut out, whether it is mirrored, and its place.
    parts = [(it.window, it.flip, buffer[it.row :, it.column :][: it.size, : it.size]) for it in frame.crops]
    rows, columns = buffer.shape[:2] if parts else frame.taken
    if parts:
        buffer[:] = 0
    else:
        parts = [(frame.window, frame.flip, buffer[:rows, :columns])]
    # A stored image of the right size and the buffer's full width is decoded directly into the buffer.
    in_place = stored == (rows, columns) and columns == len(buffer) and frame.is_whole
    in_place = in_place and not frame.flip and not frame.crops
    # The smallest scale that enlarges no part.
    least = (
        max(-(-len(target) * frame.height // window[3]) for window, _, target in parts),
        max(-(-target.shape[1] * frame.width // window[2]) for window, _, target in parts),
    )
    into = buffer if in_place else scratch("decode", *stored)
    image, eighths = jpeg.decode_scaled(data, stored, least, into)
    for window, flip, target in [] if in_place else parts:
        edges = window_edges(frame, window, stored, eighths)
        part = resample(image, edges, len(target), target.shape[1], None if flip else target)
        if flip:
            cv2.flip(part, 1, dst=target)
        elif part is not target:
            target[:] = part
    if frame.pixels is not None:
        buffer[:rows, :columns] = frame.pixels(buffer[:rows, :columns].copy())
    buffer[rows:] = 0
    buffer[:rows, columns:] = 0


def window_edges(frame: Frame, window: Window, stored: tuple[int, int], eighths: int = 8) -> Edges:
    """Top, bottom, left and right edge of a window, between pixels of an image decoded at n/8 of `stored`."""
    x, y, width, height = window
    down, across = stored[0] * eighths, stored[1] * eighths
    top, bottom = (edge * down / (8 * frame.height) for edge in (y, y + height))
    left, right = (edge * across / (8 * frame.width) for edge in (x, x + width))
    return top, bottom, left, right


def paint(pixels: Tensor, stored: tuple[int, int], frame: Frame, target: Tensor) -> None:
    """Resize the frame's window of a stored image, uint8 [height, width, 3], into a square of its device."""
    rows, columns = frame.taken
    edges = window_edges(frame, frame.window, stored)
    top, bottom, left, right = (int(edge) for edge in edges)
    whole = (top, bottom, left, right) == edges
    part = pixels[top:bottom, left:right] if whole else pixels
    if not whole or part.shape[:2] != (rows, columns):
        source = part.permute(2, 0, 1)[None].float()
        if whole:
            resized = interpolate(source, (rows, columns), mode="bilinear", antialias=True)
        else:
            resized = _shifted(source, edges, rows, columns)
        part = resized[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
    target[:rows, :columns] = part.flip(1) if frame.flip else part
    if frame.pixels is not None:  # a function of numpy: the image goes to the host and back
        changed = frame.pixels(target[:rows, :columns].cpu().numpy().copy())
        target[:rows, :columns] = torch.from_numpy(np.ascontiguousarray(changed))
    target[rows:] = 0
    target[:rows, columns:] = 0


def _shifted(source: Tensor, edges: Edges, rows: int, columns: int) -> Tensor:
    """A window with edges between pixels, resized bilinearly, float [1, 3, rows, columns]."""
    top, bottom, left, right = edges
    height, width = source.shape[2:]
    # Where it is reduced, each pixel is the mean of n x m values, so that no pixel is skipped.
    n, m = ceil((bottom - top) / rows), ceil((right - left) / columns)

    def centres(start: float, stop: float, count: int, size: int) -> Tensor:
        """Centres of the result's pixels in the coordinates of grid_sample: -1 to 1 from edge to edge."""
        steps = torch.arange(count, dtype=torch.float32, device=source.device) + 0.5
        return (start + steps * ((stop - start) / count)) * (2 / size) - 1

    y, x = centres(top, bottom, n * rows, height), centres(left, right, m * columns, width)
    grid = torch.stack((x.expand(len(y), len(x)), y[:, None].expand(len(y), len(x))), -1)
    values = grid_sample(source, grid[None], mode="bilinear", padding_mode="border", align_corners=False)
    return avg_pool2d(values, (n, m))
