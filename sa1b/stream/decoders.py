"""The decoders by name: that of the CPU, and torchcodec, which decodes a micro-batch in the memory of a GPU.

The faults of `torchcodec.decoders.decode_jpeg` (0.16 or later), and how each is found:

    output over memory in use      memory and stream are those of a lane, see `CudaLane`
    success for a skipped image    memory is filled beforehand; corners and centre are checked afterwards
    no image, or another size      compared with the header of the file
    an error for all files         each file is decoded alone
    images turned as EXIF says     it gets the files without their EXIF segments

An image with such a fault is decoded on the CPU. From the start, so are files that torchcodec does not decode
as libjpeg-turbo does (CMYK, fewer than 16 pixels high or wide, without the marker of their end), and those
that are reduced by more than 16, because the kernel for resizing lacks memory for its filter.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import accumulate, compress, pairwise
from queue import LifoQueue
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.errors import BadSample, Sa1bError
from sa1b.shards import MAX_STORED_PIXELS
from sa1b.stream.decode import CpuDecoder, EncodedImage, paint

Size = tuple[int, int]  # height and width, pixels
File = bytes | memoryview

LANES = 2  # micro-batches at a time: one is resized while the next one is decoded
_CORNER = 8  # pixels; height and width of each part that is checked
_LEAST = 16  # pixels; smallest height and width that is decoded on the GPU
_REDUCTION = 16  # stored pixels per pixel of the square, at most
_END = b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")
_GAP = 512  # bytes; the allocator rounds sizes up to it, so blocks that touch may be that far apart
_EXIF = b"Exif\0\0"
_APP1, _SOS, _EOI = 0xE1, 0xDA, 0xD9
POISON = 0xA5  # a byte; output memory is filled with it before decoding, to find images that were not written
_CUDA: Any = torch.cuda  # some of its functions are untyped
_GROWTH = 1.5


class DecoderError(Sa1bError):
    """torchcodec does not decode JPEG files on this GPU; the message has the reason."""


class CudaLane:
    """A CUDA stream with memory of its own, on which one thread at a time decodes, inside `current`."""

    # The JPEG engine in a GPU does not wait for the stream that it is given: it may write its output before
    # earlier work of that stream has run (github.com/pytorch/vision/pull/9606), and so over memory that was
    # freed on the host and that queued kernels still read. The allocator reuses memory on the same stream
    # only, so the host waits for all work of the lane before the engine writes. A pool (torch.cuda.MemPool)
    # would do harm: while a thread allocates from one, the allocator forgets `Tensor.record_stream`. PyTorch
    # has only 32 streams of high priority for all callers: a process makes few lanes.

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._decode_jpeg = decode_jpeg()
        self._stream = _CUDA.Stream(device, priority=-1)
        self._caller: Any = None
        self._host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context in which the thread uses this lane; at its end the caller's stream waits for the lane."""
        self._caller = caller = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                caller.wait_stream(self._stream)

    def follow(self) -> None:
        """Let work that is submitted from now on wait for the stream that was current before `current`."""
        self._stream.wait_stream(self._caller)

    def synchronize(self) -> None:
        """Wait on the host until all work of this lane has ended."""
        self._stream.synchronize()

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        """New memory, uint8, that a kernel on the stream of this lane fills with POISON."""
        return torch.full(shape, POISON, dtype=torch.uint8, device=self.device)

    def host(self, size: int) -> Tensor:
        """Host memory of at least `size` bytes, uint8, always the same: use it after `synchronize`."""
        if size > len(self._host):
            self._host = torch.empty(int(size * _GROWTH), dtype=torch.uint8, pin_memory=True)
        return self._host

    def decode(self, files: list[Tensor]) -> list[Tensor]:
        """Decode files in host memory to uint8 [3, height, width]; RuntimeError: one of them fails."""
        return list(self._decode_jpeg(files, mode="RGB", device=self.device))


class GpuDecoder:
    """Decodes on a GPU with torchcodec; see the module and `CpuDecoder`. On return, the work is submitted to
    the current stream.

    `counts` are the images of all streams of the process by how they were decoded: "gpu"; "cpu": files that
    are not for a GPU; "refused": on the CPU because torchcodec returned none; "skipped": on the CPU because
    it reported success without writing the image.
    """

    batched = True

    def __init__(self, lane: Callable[[torch.device], CudaLane] = CudaLane, device: str = "cuda") -> None:
        self.device, self.counts = torch.device(device), Counter[str]()
        self._make_lane, self._lock = lane, threading.Lock()
        self._lanes = dict[torch.device, LifoQueue[CudaLane | None]]()  # idle ones; None: not made yet

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        """See `CpuDecoder.decode`."""
        sizes = {i: size for i, image in enumerate(images) if (size := _size_for_gpu(image))}
        done, refused = set[int](), 0
        if sizes:
            with self._borrowed(out.device) as lane, lane.current():
                decoded = decoded_on([images[i].jpeg for i in sizes], list(sizes.values()), lane)
                good = written(decoded)
                lane.follow()  # `out` may still be in use by earlier work of the caller's stream
                for i, pixels, is_good in zip(sizes, decoded, good, strict=True):
                    if pixels is not None and is_good:
                        paint(pixels, sizes[i], images[i].frame, out[i])
            done, refused = set(compress(sizes, good)), sum(pixels is None for pixels in decoded)
        skipped = len(sizes) - len(done) - refused
        self._count(gpu=len(done), cpu=len(images) - len(sizes), skipped=skipped, refused=refused)
        return [None if i in done else _decode_on_cpu(image, out[i]) for i, image in enumerate(images)]

    @contextmanager
    def _borrowed(self, device: torch.device) -> Iterator[CudaLane]:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = LifoQueue()
                for _ in range(LANES):
                    self._lanes[device].put(None)
        lane = self._lanes[device].get()
        try:
            lane = lane or self._new_lane(device)
            yield lane
        finally:
            self._lanes[device].put(lane)

    def _new_lane(self, device: torch.device) -> CudaLane:
        """A lane that has decoded a test image: a broken torchcodec would leave all images to the CPU."""
        lane, test = self._make_lane(device), np.full((48, 64, 3), 40, np.uint8)
        file = bytes(simplejpeg.encode_jpeg(test, 90, "RGB", "420", False))
        try:
            with lane.current():
                (image,) = decoded_on([file], [(48, 64)], lane)
                if image is None or (image.float() - 40).abs().max() >= 8:
                    raise RuntimeError("no image, or wrong pixels")
        except (RuntimeError, ValueError, TypeError) as error:
            raise DecoderError(
                f"decoder='torchcodec' on {device}: does not decode a test image ({_first_line(error)}); "
                "update torchcodec and the driver, or decode on the CPU: decode='cpu'"
            ) from error
        return lane

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self.counts += Counter(numbers)  # without those that are 0
        if numbers.get("skipped"):
            text = "torchcodec reported success for an image that it had not decoded. Such images are decoded"
            text += " on the CPU; stream.decoder.counts['skipped'] counts them"
            warnings.warn(text, stacklevel=2)  # which Python prints once


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def decoded_on(files: Sequence[File], sizes: Sequence[Size], lane: CudaLane) -> list[Tensor | None]:
    """Decode files inside `lane.current()` to pixels, uint8 [height, width, 3] on its device, in memory that
    was filled with POISON before the JPEG engine could write into it; None: not decoded to this size.
    """
    decoded: list[Tensor | None] = [None] * len(files)
    left = list(range(len(files)))
    for _ in range(2):  # the second time, the memory of the first one is free as well
        spans = _filled_spans([(3, *sizes[i]) for i in left], lane)
        lane.synchronize()  # now neither a kernel that fills memory nor one that reads it is left
        images, outside = _all(_copied([files[i] for i in left], lane), lane), []
        for i, image in zip(left, images, strict=True):
            if image is None or image.shape != (3, *sizes[i]):
                continue
            start, stop = image.data_ptr(), image.data_ptr() + image.nbytes
            if any(first <= start and stop <= last for first, last in spans):
                decoded[i] = image.permute(1, 2, 0)
            else:
                outside.append(i)
        if not (left := outside):
            break
    return decoded


def _all(files: list[Tensor], lane: CudaLane) -> list[Tensor | None]:
    """Decode in one call; if it fails, each file alone."""
    try:
        return list(lane.decode(files))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        if len(files) == 1:
            return [None]
    return [image for file in files for image in _all([file], lane)]


def _filled_spans(shapes: list[tuple[int, ...]], lane: CudaLane) -> list[Size]:
    """Fill and free memory, so that torchcodec allocates its output there; its addresses, ascending."""
    blocks = [lane.filled(shape) for shape in shapes]
    spans: list[Size] = []
    for start, stop in sorted((block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks):
        if spans and start <= spans[-1][1] + _GAP:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans


def _copied(files: Sequence[File], lane: CudaLane) -> list[Tensor]:
    """The files in memory that can be written, without EXIF segments, by which torchcodec turns images."""
    parts = [list(without_exif(file)) for file in files]
    ends = list(accumulate((sum(map(len, part)) for part in parts), initial=0))
    memory, pieces = lane.host(ends[-1]), [np.frombuffer(piece, np.uint8) for part in parts for piece in part]
    np.concatenate(pieces, out=memory.numpy()[: ends[-1]])
    return [memory[start:stop] for start, stop in pairwise(ends)]


def without_exif(file: File) -> Iterator[memoryview]:
    """The parts of a JPEG file around its EXIF segments; markers are those of ITU-T T.81, annex B."""
    data, kept, position = memoryview(file), 0, 2
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] not in (_SOS, _EOI):
        if data[position + 1] == 0xFF:  # a fill byte
            position += 1
            continue
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == _APP1 and data[position + 4 : position + 10] == _EXIF:
            yield data[kept:position]
            kept = end
        position = end
    yield data[kept:]


def _size_for_gpu(image: EncodedImage) -> Size | None:
    """Height and width in the header of a file that is decoded on the GPU; None for other files."""
    frame = image.frame
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(image.jpeg)
    except ValueError:
        return None  # the CPU's decoder reports the reason
    suits = min(height, width) >= _LEAST and height * width <= MAX_STORED_PIXELS
    suits = suits and colours in _COLOURS and image.jpeg[-2:] == _END
    down = frame.window[3] * height / frame.height / frame.taken[0]
    across = frame.window[2] * width / frame.width / frame.taken[1]
    return (height, width) if suits and max(down, across) <= _REDUCTION else None


def _decode_on_cpu(image: EncodedImage, out: Tensor) -> BadSample | None:
    buffer = torch.empty(out.shape, dtype=torch.uint8)
    (error,) = CpuDecoder().decode([image], buffer[None])
    out.copy_(buffer)
    return error


def written(images: Sequence[Tensor | None]) -> list[bool]:
    """Whether corners and centre of each image, uint8 [height, width, 3], were written over POISON. False for
    None, and for an image with a part of this colour, which is always decoded on the CPU.
    """
    parts, side = [], _CORNER
    for image in images:
        if image is not None:
            down, right = image.shape[0] - side, image.shape[1] - side
            places = (0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2)
            parts += [image[row : row + side, column : column + side] for row, column in places]
    if not parts:
        return [False] * len(images)
    untouched = (torch.stack(parts) == POISON).flatten(1).all(1).view(-1, 5).any(1)
    remaining = iter(untouched.tolist())
    return [image is not None and not next(remaining) for image in images]


def decode_jpeg() -> Callable[..., list[Tensor]]:
    """`torchcodec.decoders.decode_jpeg`; ValueError: torchcodec is missing, too old, or lacks a library."""
    try:
        found: Callable[..., list[Tensor]] = import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BadValue(
            f"decode='gpu': needs torchcodec 0.16 or later ({_first_line(error)}); pip install 'sa1b[gpu]', "
            "or pass decode='cpu'"
        ) from None
    return found


Decoder = CpuDecoder | GpuDecoder


@cache  # one for all streams of a process: its CUDA streams must be few
def _gpu_decoder() -> Decoder:
    decode_jpeg()  # refused here, not in a thread of a loader
    return GpuDecoder()


DECODERS: dict[str, Callable[[], Decoder]] = {"cpu": CpuDecoder, "torchcodec": _gpu_decoder}


def decoder(name: str) -> Decoder:
    """The decoder of this name, one per process for a GPU. ValueError: it is unknown or not installed."""
    if name not in DECODERS:
        raise BadValue(f"decoder={name!r} must be one of {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]()
