"""The decoders by name: that of the CPU, and one for a GPU that decodes a micro-batch in the batch's memory.

    decoder = GpuDecoder("torchcodec", LIBRARIES["torchcodec"]())
    errors = decoder.decode(images, out)    # out: uint8 [n, S, S, 3] on the GPU

Faults of decoders that give no error, and how each is found:

    output over memory in use      memory and stream are those of a lane, see sa1b.stream.jpeg_libraries
    success for a skipped image    memory is filled beforehand; corners and centre are checked afterwards
    no image, or another size      compared with the header of the file

An image with such a fault is decoded on the CPU. If that fails too, its BadSample is returned, as by every
decoder. Some files are decoded on the CPU from the start: those that libraries do not decode as libjpeg-turbo
does (CMYK, fewer than 16 pixels high or wide, without the marker of their end), and those that are reduced by
more than 16, because the kernel for resizing lacks memory for its filter.
"""

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import ceil

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample, interpolate

from sa1b.arguments import BadValue
from sa1b.errors import BadSample, Sa1bError
from sa1b.shards import MAX_STORED_PIXELS
from sa1b.shards.jpeg import Edges
from sa1b.stream.decode import CpuDecoder, Decoder, EncodedImage, decode, window_edges
from sa1b.stream.jpeg_libraries import LIBRARIES, POISON, CudaLane, JpegLibrary, Lane, Size, installed
from sa1b.stream.transform import Frame

LANES = 2  # micro-batches at a time: one is resized while the next one is decoded
_CORNER = 8  # pixels; height and width of each part that is checked
_LEAST = 16  # pixels; smallest height and width that is decoded on the GPU
_REDUCTION = 16  # stored pixels per pixel of the square, at most
_END = b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")


class DecoderError(Sa1bError):
    """A library does not decode JPEG files on this GPU; the message has the reason."""


class GpuDecoder:
    """Decodes on a GPU with one of sa1b.stream.jpeg_libraries; see the module and `Decoder`.

    `counts` are the images of all streams of the process by how they were decoded: "gpu"; "cpu": files that
    are not for a GPU; "refused": on the CPU because the library returned none; "skipped": on the CPU because
    the library reported success without writing the image.
    """

    # Images are resized on the GPU with antialiasing: bilinear, with a filter as wide as the reduction. The
    # CPU decoder reduces by the DCT and by means, so the pixels differ; `benchmarks.gpu` measures by how
    # much.
    batched = True

    def __init__(
        self,
        name: str,
        library: Callable[[torch.device], JpegLibrary],
        lane: Callable[[torch.device], Lane] = CudaLane,
        device: str = "cuda",
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.counts: Counter[str] = Counter()
        self._new_library, self._new_lane = library, lane
        self._idle: defaultdict[torch.device, list[tuple[Lane, JpegLibrary]]] = defaultdict(list)
        self._permits = threading.Semaphore(LANES)
        self._lock = threading.Lock()

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        """See `Decoder`."""
        sizes = [_size_for_gpu(image) for image in images]
        on_gpu = [i for i, size in enumerate(sizes) if size is not None]
        done = self._decode_on_gpu(images, [(i, size) for i, size in enumerate(sizes) if size], out)
        errors: list[BadSample | None] = [None] * len(images)
        for i in sorted(set(range(len(images))) - done):
            errors[i] = _decode_on_cpu(images[i], out[i])
        self._count(gpu=len(done), cpu=len(images) - len(on_gpu))
        return errors

    def _decode_on_gpu(
        self, images: Sequence[EncodedImage], sizes: list[tuple[int, Size]], out: Tensor
    ) -> set[int]:
        """Decode images of given stored sizes into `out`; return those that were decoded."""
        if not sizes:
            return set()
        with self._borrowed(out.device) as (lane, library), lane.current():
            files = [images[i].jpeg for i, _ in sizes]
            decoded = library.decode(files, [size for _, size in sizes], lane)
            right = [
                None if pixels is None or tuple(pixels.shape) != (*size, 3) else pixels
                for pixels, (_, size) in zip(decoded, sizes, strict=True)
            ]
            good = written(right)
            lane.follow()  # `out` may still be in use by earlier work of the caller's stream
            for (i, size), pixels, is_good in zip(sizes, right, good, strict=True):
                if pixels is not None and is_good:
                    paint(pixels, size, images[i].frame, out[i])
        skipped = sum(pixels is not None for pixels in right) - sum(good)
        self._count(skipped=skipped, refused=len(sizes) - sum(good) - skipped)
        return {i for (i, _), is_good in zip(sizes, good, strict=True) if is_good}

    @contextmanager
    def _borrowed(self, device: torch.device) -> Iterator[tuple[Lane, JpegLibrary]]:
        """A lane with its library, for this thread alone."""
        with self._permits:
            with self._lock:
                idle = self._idle[device]
                pair = idle.pop() if idle else self._new(device)
            try:
                yield pair
            finally:
                with self._lock:
                    idle.append(pair)

    def _new(self, device: torch.device) -> tuple[Lane, JpegLibrary]:
        """A new lane whose library has decoded a test image: a broken one would leave all to the CPU."""
        lane, size = self._new_lane(device), (48, 64)
        test = np.full((*size, 3), 40, np.uint8)
        file = bytes(simplejpeg.encode_jpeg(test, 90, "RGB", "420", False))
        try:
            library = self._new_library(device)
            with lane.current():
                (image,) = library.decode([file], [size], lane)
                works = image is not None and bool((image.float() - 40).abs().max() < 8)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DecoderError(self._does_not_work(device, reason)) from error
        if not works:
            raise DecoderError(self._does_not_work(device, "no image" if image is None else "wrong pixels"))
        return lane, library

    def _does_not_work(self, device: torch.device, reason: str) -> str:
        return (
            f"decoder={self.name!r}: does not decode a test image on {device} ({reason}); update {self.name} "
            "and the driver, or decode on the CPU: decode='cpu'"
        )

    def _count(self, **numbers: int) -> None:
        with self._lock:
            warns = not self.counts["skipped"] and numbers.get("skipped", 0)
            self.counts.update({name: number for name, number in numbers.items() if number})
        if warns:
            warnings.warn(
                f"{self.name} reported success for an image that it had not decoded. Such images are decoded "
                "on the CPU; stream.decoder.counts['skipped'] counts them",
                stacklevel=2,
            )


def _size_for_gpu(image: EncodedImage) -> Size | None:
    """Height and width in the header of a file that is decoded on the GPU; None for other files."""
    frame = image.frame
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(image.jpeg)
    except ValueError:
        return None  # the CPU's decoder reports the reason
    if height * width > MAX_STORED_PIXELS or min(height, width) < _LEAST:
        return None
    if colours not in _COLOURS or image.jpeg[-2:] != _END:
        return None
    down = frame.window[3] * height / frame.height / frame.taken[0]
    across = frame.window[2] * width / frame.width / frame.taken[1]
    return (height, width) if max(down, across) <= _REDUCTION else None


def _decode_on_cpu(image: EncodedImage, out: Tensor) -> BadSample | None:
    buffer = np.empty(tuple(out.shape), np.uint8)
    try:
        decode(image.jpeg, image.frame, buffer)
    except BadSample as error:
        return error
    out.copy_(torch.from_numpy(buffer))
    return None


def written(images: Sequence[Tensor | None]) -> list[bool]:
    """Whether four corners and centre of each image, uint8 [height, width, 3], were written over POISON.

    Waits for the current stream. Images have at least 8 pixels a side; for None the result is False. If a
    part of an image really has the colour of POISON, the result is False too, and the image is always decoded
    on the CPU.
    """
    parts, side = [], _CORNER
    for image in images:
        if image is not None:
            top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
            parts += [image[:side, :side], image[:side, -side:], image[-side:, :side], image[-side:, -side:]]
            parts.append(image[top : top + side, left : left + side])
    if not parts:
        return [False] * len(images)
    untouched = (torch.stack(parts) == POISON).flatten(1).all(1).view(-1, 5).any(1)
    remaining = iter(untouched.tolist())
    return [image is not None and not next(remaining) for image in images]


def paint(pixels: Tensor, stored: Size, frame: Frame, target: Tensor) -> None:
    """Write the frame's window of a decoded image into a padded square, resized with antialiasing. `pixels`,
    uint8 [height, width, 3], is the whole stored image; `target`, uint8 [S, S, 3], is on the same device, and
    its pixels outside of the frame become 0.
    """
    rows, columns = frame.taken
    edges = window_edges(frame, stored)
    top, bottom, left, right = (int(edge) for edge in edges)
    whole = (top, bottom, left, right) == edges
    if whole and (bottom - top, right - left) == (rows, columns):
        part = pixels[top:bottom, left:right]
    else:
        if whole:
            source = pixels[top:bottom, left:right].permute(2, 0, 1)[None].float()
            resized = interpolate(
                source, (rows, columns), mode="bilinear", align_corners=False, antialias=True
            )
        else:
            resized = _shifted(pixels.permute(2, 0, 1)[None].float(), edges, rows, columns)
        part = resized[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
    target[:rows, :columns] = part.flip(1) if frame.flip else part
    if frame.pixels is not None:  # a function of numpy: the image goes to the host and back
        host = target[:rows, :columns].cpu().numpy().copy()
        target[:rows, :columns] = torch.from_numpy(np.ascontiguousarray(frame.pixels(host)))
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


@cache  # one for all streams of a process: its CUDA streams must be few
def _gpu_decoder(name: str) -> Decoder:
    return GpuDecoder(name, LIBRARIES[name]())


DECODERS: dict[str, Callable[[], Decoder]] = {
    "cpu": CpuDecoder,
    "torchcodec": partial(_gpu_decoder, "torchcodec"),
    "nvimgcodec": partial(_gpu_decoder, "nvimgcodec"),
}
DECODES = ("auto", "cpu", "gpu")  # choices of sa1b.Loader(decode=)


def decoder(name: str) -> Decoder:
    """The decoder of this name, one per process for a GPU. ValueError: it is unknown or not installed."""
    if name not in DECODERS:
        raise BadValue(f"decoder={name!r} must be one of {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]()


def decoder_for(decode: str, current: Decoder, name: str) -> str:
    """The name of the decoder of a loader whose stream has `name`; ValueError if `decode` is unknown.

    "gpu" is the stream's decoder if it decodes on a GPU, else the first library of sa1b.stream.jpeg_libraries
    that is installed, else a ValueError. "auto" is the stream's decoder: on a GPU no rate has been measured
    yet, so it never replaces a decoder.
    """
    if decode not in DECODES:
        raise BadValue(f"decode={decode!r} must be one of {', '.join(map(repr, DECODES))}")
    if decode == "gpu" and current.device.type == "cpu":
        return installed()
    return "cpu" if decode == "cpu" else name
