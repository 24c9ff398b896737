"""Libraries that decode JPEG files on a GPU, and what each needs so that no fault of theirs stays silent.

    torchcodec    torchcodec.decoders.decode_jpeg, from version 0.16 on. It allocates its output, waits for
                  the JPEG engine, turns images by the orientation in EXIF, and fails for all files if it
                  fails for one
    nvimgcodec    nvidia.nvimgcodec.Decoder, from version 0.8 on. It writes into given memory and returns None
                  for a file that it cannot decode

Both decode baseline files on the JPEG engine of the GPU, if it has one, and other files with kernels.

Nothing in this module has run on a GPU yet. The calls of nvimgcodec 0.9 were run with its CPU back end, and
those of torchcodec are written by its documentation and source of 0.16 and 0.17.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from itertools import accumulate, chain, pairwise
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.workers import available_cpus

Size = tuple[int, int]  # height and width, pixels
File = bytes | memoryview

# Name -> distributions that have the library, and its first version that can be used.
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], tuple[int, int]]] = {
    "torchcodec": (("torchcodec",), (0, 16)),
    "nvimgcodec": (("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12"), (0, 8)),
}
_GAP = 512  # bytes; the allocator rounds sizes up to it, so blocks that touch may be that far apart
_EXIF = b"Exif\0\0"
_APP1, _SOS, _EOI = 0xE1, 0xDA, 0xD9
POISON = 0xA5  # a byte; output memory is filled with it before decoding, to find images that were not written
_CUDA: Any = torch.cuda  # some of its functions are untyped
_GROWTH = 1.5


class Lane(Protocol):
    """Interface of a lane: a CUDA stream with memory of its own. One thread at a time uses it, inside
    `current`.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def handle(self) -> int:
        """The CUDA stream, as a number for other libraries."""
        ...

    def current(self) -> Any:
        """A context in which the thread submits to this lane and allocates its memory. On exit, the stream
        that was current before waits for the lane.
        """
        ...

    def follow(self) -> None:
        """Let work that is submitted from now on wait for the stream that was current before `current`."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all work of this lane has ended."""
        ...

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        """New memory, uint8, that a kernel on the stream of this lane fills with POISON."""
        ...

    def host(self, size: int) -> Tensor:
        """Host memory of at least `size` bytes, uint8, always the same: use it after `synchronize`."""
        ...


class CudaLane:
    """A lane on a CUDA device, with an index. PyTorch has 32 streams of high priority, and gives them to
    callers in turn. So only a few lanes may be made in a process; see `sa1b.stream.decoders.decoder`.
    """

    # The JPEG engine in a GPU does not wait for the stream that it is given: it may write its output before
    # earlier work of that stream has run (github.com/pytorch/vision/pull/9606). PyTorch's allocator reuses
    # memory as soon as it is freed on the host, because later work of the same stream runs later. So the JPEG
    # engine would overwrite memory that queued kernels still read, without an error. A lane, a CUDA stream
    # whose memory no other stream uses, prevents this:
    #
    #     its memory was allocated on its stream, and the allocator reuses memory on the same stream only
    #     the host waits for all work of the lane before the engine writes
    #
    # A pool (torch.cuda.MemPool) would not add to this. While a thread allocates from one, the allocator
    # treats all threads as if a CUDA graph were captured: it forgets what `Tensor.record_stream` says, and
    # would hand out the memory of batches that the caller's stream still reads.

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _CUDA.Stream(device, priority=-1)
        self._caller: Any = None
        self._host = torch.empty(0, dtype=torch.uint8)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        self._caller = caller = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                caller.wait_stream(self._stream)

    def follow(self) -> None:
        self._stream.wait_stream(self._caller)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.uint8, device=self.device)

    def host(self, size: int) -> Tensor:
        if size > len(self._host):
            self._host = torch.empty(int(size * _GROWTH), dtype=torch.uint8, pin_memory=True)
        return self._host


class JpegLibrary(Protocol):
    """Interface of a library's decoder; one thread at a time uses it."""

    def decode(self, files: Sequence[File], sizes: Sequence[Size], lane: Lane) -> list[Tensor | None]:
        """Decode n files inside `lane.current()`. Files that cannot be decoded raise nothing.

        Returns:
            For each file its pixels, uint8 [height, width, 3] on the lane's device, in memory that was filled
            with POISON before the JPEG engine could write into it; None if the file was not decoded.
        """
        ...


def installed() -> str:
    """The first library that is installed in a version that can be used; ValueError if there is none."""
    old = []
    for name, (distributions, least) in DISTRIBUTIONS.items():
        for distribution in distributions:
            if (version := _version(distribution)) is None:
                continue
            if _numbers(version) >= least:
                return name
            old.append(f" ({distribution} {version} is installed)")
    needs = " or ".join(
        f"{distributions[0]} {'.'.join(map(str, least))} or later"
        for distributions, least in DISTRIBUTIONS.values()
    )
    raise BadValue(
        f"decode='gpu': needs {needs}{''.join(old)}; pip install 'sa1b[gpu]', or pass decode='cpu'"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _library(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # missing, or libraries of CUDA that it needs are
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadValue(
            f"decoder={name!r}: {module} cannot be imported ({reason}); pip install 'sa1b[gpu]', or pass "
            "decoder='cpu'"
        ) from None


class Torchcodec:
    """torchcodec, whose `torchcodec.decoders.decode_jpeg` is `decode`; see the module."""

    def __init__(self, decode: Callable[..., list[Tensor]]) -> None:
        self._decode = decode

    def decode(self, files: Sequence[File], sizes: Sequence[Size], lane: Lane) -> list[Tensor | None]:
        """See `JpegLibrary`."""
        decoded: list[Tensor | None] = [None] * len(files)
        left = list(range(len(files)))
        for _ in range(2):  # the second time, the memory of the first one is free as well
            spans = _filled_spans([(3, *sizes[i]) for i in left], lane)
            lane.synchronize()  # now neither a kernel that fills memory nor one that reads it is left
            images = self._all(_copied([files[i] for i in left], lane), lane.device)
            outside = []
            for i, image in zip(left, images, strict=True):
                if image is not None and _inside(image, spans):
                    decoded[i] = image.permute(1, 2, 0)
                elif image is not None:
                    outside.append(i)
            left = outside
            if not left:
                break
        return decoded

    def _all(self, files: list[Tensor], device: torch.device) -> list[Tensor | None]:
        """Decode in one call; if it fails, each file alone."""
        try:
            return list(self._decode(files, mode="RGB", device=device))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:
            if len(files) == 1:
                return [None]
        return [image for file in files for image in self._all([file], device)]


class Nvimgcodec:
    """The module `nvidia.nvimgcodec` on a GPU with an index; see the module's docstring."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        kinds = library.BackendKind
        # With CPU_ONLY, what a GPU cannot decode would be decoded on the CPU without a word. With a load hint
        # below 1, which files the JPEG engine decodes, and so their pixels, would depend on the batch.
        backends = [
            library.Backend(kind, load_hint=1.0)
            for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
        ]
        self._decoder = library.Decoder(
            device_id=device.index,
            max_num_cpu_threads=max(1, available_cpus() - 1),  # it warns about more
            backends=backends,
            options=":fancy_upsampling=1",  # as libjpeg-turbo does
        )
        self._params = library.DecodeParams(apply_exif_orientation=False)

    def decode(self, files: Sequence[File], sizes: Sequence[Size], lane: Lane) -> list[Tensor | None]:
        """See `JpegLibrary`."""
        buffers = [lane.filled((*size, 3)) for size in sizes]
        lane.synchronize()
        images = self._decoder.decode(
            [self._library.CodeStream(np.frombuffer(file, np.uint8)) for file in files],
            images=self._library.as_images([_exported(buffer) for buffer in buffers], lane.handle),
            params=self._params,
            cuda_stream=lane.handle,
        )
        return [None if image is None else buffer for image, buffer in zip(images, buffers, strict=True)]


def _exported(buffer: Tensor) -> Any:
    """Memory as nvimgcodec takes it: through DLPack's or CUDA's interface, or numpy's on a CPU."""
    return buffer.numpy() if buffer.device.type == "cpu" else buffer


LIBRARIES: dict[str, Callable[[], Callable[[torch.device], JpegLibrary]]] = {
    "torchcodec": lambda: _torchcodec(_library("torchcodec.decoders", "torchcodec")),
    "nvimgcodec": lambda: _nvimgcodec(_library("nvidia.nvimgcodec", "nvimgcodec")),
}


def _torchcodec(library: ModuleType) -> Callable[[torch.device], JpegLibrary]:
    if not hasattr(library, "decode_jpeg"):
        raise BadValue(
            "decoder='torchcodec': needs torchcodec 0.16 or later; pip install 'sa1b[gpu]', or pass "
            "decoder='cpu'"
        )
    return lambda _: Torchcodec(library.decode_jpeg)


def _nvimgcodec(library: ModuleType) -> Callable[[torch.device], JpegLibrary]:
    return lambda device: Nvimgcodec(library, device)


def _filled_spans(shapes: list[tuple[int, ...]], lane: Lane) -> list[Size]:
    """Fill and free memory, so that the library allocates its output there; its addresses, ascending."""
    blocks = [lane.filled(shape) for shape in shapes]
    spans: list[Size] = []
    for start, stop in sorted((block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks):
        if spans and start <= spans[-1][1] + _GAP:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans


def _inside(image: Tensor, spans: list[Size]) -> bool:
    start = image.data_ptr()
    return any(first <= start and start + image.nbytes <= last for first, last in spans)


def _copied(files: Sequence[File], lane: Lane) -> list[Tensor]:
    """The files in memory that can be written, without EXIF segments, by which the library turns images."""
    parts = [list(without_exif(file)) for file in files]
    ends = list(accumulate((sum(map(len, part)) for part in parts), initial=0))
    memory = lane.host(ends[-1])
    array = memory.numpy()
    position = 0
    for piece in chain.from_iterable(parts):
        array[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)
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
