"""Memory of batches: buffers that are reused, and pinned buffers for copies to a GPU. The masks of a
micro-batch: ragged runs, which become pixels on demand, and the padded form of a batch.

Allocating memory takes longer than filling it, because the system clears every page at its first use. For the
64 MB of an image's masks at 1024 x 1024, writing takes 9 ms in new memory and 2.5 ms in a reused buffer.
Buffers are therefore reused. A buffer belongs to the caller until its last tensor, and every view of it, is
unreferenced.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.masks import raster, raster_torch
from sa1b.masks.proved import raster_in_use
from sa1b.masks.runs import Runs, check_size

_CPU = torch.device("cpu")
_CUDA: Any = torch.cuda  # some of its functions are untyped
_BOX = np.dtype((np.int64, 4))  # edges of a box: top, bottom, left, right


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """A dataclass of tensors that are moved together, also those in nested dataclasses of this kind."""

    def map_tensors(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy in which function(name, tensor) replaces each tensor, also in nested dataclasses."""
        changed: dict[str, Any] = {}
        for member in fields(self):
            value = getattr(self, member.name)
            if isinstance(value, Tensor):
                changed[member.name] = function(member.name, value)
            elif isinstance(value, Tensors):
                changed[member.name] = value.map_tensors(function)
        return replace(self, **changed)

    def pin_memory(self) -> Self:
        """A copy in pinned memory, from which copies to a GPU need not wait."""
        return self.map_tensors(lambda name, tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell CUDA's allocator that `stream` uses these tensors too."""

        def record(name: str, tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self.map_tensors(record)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        """A copy on another device; tensors that are already there are not copied. Copies to the CPU are
        always complete on return: nothing else would keep the caller from reading them too early.
        """
        non_blocking &= torch.device(device).type != "cpu"
        return self.map_tensors(lambda name, tensor: tensor.to(device, non_blocking=non_blocking))


AnyTensors = TypeVar("AnyTensors", bound=Tensors)


class BufferPool:
    """Buffers of `capacity` bytes, shared by threads. `keep` of them are reused, others freed."""

    def __init__(self, capacity: int, keep: int) -> None:
        self.capacity = capacity
        self.keep = keep
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A uint8 tensor of this shape, of at most `capacity` bytes, not initialised."""
        size = int(np.prod(shape, dtype=np.int64))
        if size > self.capacity:
            raise BadValue(f"{size} bytes: must fit the buffer of {self.capacity}")
        return self._lend(self._buffer(), 0, size).view(shape)

    def _buffer(self) -> npt.NDArray[np.uint8]:
        try:
            return self._free.popleft()
        except IndexError:
            return self._new()

    def _lend(self, buffer: npt.NDArray[np.uint8], start: int, stop: int) -> Tensor:
        """A part of a buffer, which returns to the pool once no tensor and no array refers to the part."""
        part = buffer[start:stop]
        weakref.finalize(part, self._take_back, buffer).atexit = False
        return torch.from_numpy(part)

    def _take_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        # Without a lock: any thread may run it, also while it holds one.
        if len(buffer) == self.capacity and len(self._free) < self.keep:
            self._free.append(buffer)

    def _new(self) -> npt.NDArray[np.uint8]:
        return _allocate(self.capacity)


class MaskBufferPool(BufferPool):
    """Buffers for dense masks that record which parts are not 0, so that only these are cleared."""

    # The boxes of the masks are stored before their pixels. In fresh memory all boxes are 0: no mask was
    # rasterised there. The buffers grow with the batches: the largest number of masks that a stream may give,
    # `masks`, can be many times that of its batches. Their number grows with the batches that a caller holds:
    # one, while the next is rasterised, needs two.

    def __init__(self, masks: int, size: int, keep: int) -> None:
        self._most, self._masks, self._size = masks, 0, size
        self._lock = threading.Lock()
        self._lent: dict[int, None] = {}  # id of each buffer that is referenced
        self._limit = 2  # buffers that are kept, referenced or not
        super().__init__(0, keep)

    def take_known(self, masks: int) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Pixels uint8 [masks, size, size], and int64 [masks, 4] for `sa1b.masks.raster.rasterize_frame`.

        The boxes are valid only if that function alone writes into the pixels, with these boxes, and as long
        as the pixels are referenced.
        """
        with self._lock:
            if masks > self._masks:
                self._masks = max(masks, min(self._most, masks * 5 // 4))
                self.capacity = self._masks * (_BOX.itemsize + self._size**2)
                self._free.clear()
            buffer = self._buffer()
            self._limit = max(self._limit, len(self._lent) + 1)
            self._lent[id(buffer)] = None
        head = len(buffer) // (_BOX.itemsize + self._size**2) * _BOX.itemsize
        boxes = buffer[:head].view(np.int64).reshape(-1, 4)[:masks]
        pixels = self._lend(buffer, head, head + masks * self._size**2)
        return pixels.view(masks, self._size, self._size), boxes

    def spare(self) -> bool:
        """Whether `take_known` needs no more buffers than were referenced at a time before."""
        return len(self._lent) < self._limit

    def _take_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._lent.pop(id(buffer), None)
        if len(self._free) + len(self._lent) < self._limit:
            super()._take_back(buffer)

    def _new(self) -> npt.NDArray[np.uint8]:
        return np.zeros(self.capacity, np.uint8)


class SideStream:
    """A CUDA stream for copying and rasterising in parallel with the caller's stream. A device without an
    index is the current one of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = _CUDA.Stream(self.device)

    def begin_thread(self) -> None:
        """Set the device of a new thread; otherwise it would be the first device of the process."""
        torch.cuda.set_device(self.device)

    def current(self) -> AbstractContextManager[object]:
        """A context in which the calling thread submits to this stream."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """New memory on the device for this stream, uint8, not initialised."""
        with self.current():
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        """New pinned memory, uint8, from which copies need not wait."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def copy(self, batch: AnyTensors) -> AnyTensors:
        """Submit the copies of a batch to the device."""
        return batch.to(self.device)

    def event(self) -> Any:
        """An event after all work that was submitted so far."""
        event = _CUDA.Event()
        event.record(self._stream)
        return event

    def hand_over(self, batch: Tensors, ready: Any) -> None:
        """Make the caller's current stream wait for an event, and the allocator for the caller's stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        batch.record_stream(current)


class PinnedBuffer:
    """Pinned memory of one batch for the copy to a GPU: its images, and all other tensors packed.

    Copies from it are asynchronous. `wait` returns when the last copy has ended: call it before writing.
    """

    def __init__(self, side: SideStream, shape: tuple[int, ...]) -> None:
        self._side = side
        self.images = side.pinned(shape)
        self._small = side.pinned((0,))
        self._copied: Any = None

    def small(self, size: int) -> Tensor:
        """Memory for `size` bytes; it grows by a factor of 1.5."""
        if size > len(self._small):
            self._small = self._side.pinned((size * 3 // 2,))
        return self._small[:size]

    def copied(self) -> None:
        """Record that the copies from this memory were submitted."""
        self._copied = self._side.event()

    def wait(self) -> None:
        """Wait until the copies of the previous batch have ended."""
        if self._copied is not None:
            self._copied.synchronize()


def fresh(shape: tuple[int, ...], device: torch.device = _CPU) -> Tensor:
    """New memory for pixels, uint8, not initialised."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    # Shaped by torch: numpy gives an array without elements other strides.
    return torch.from_numpy(_allocate(int(np.prod(shape, dtype=np.int64)))).view(shape)


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """Memory in huge pages: the first write to 1024 x 1024 pixels takes 0.11 ms instead of 0.32."""
    return np.empty(size, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedMasks(Tensors):
    """The masks of a micro-batch as runs, M masks of B images.

    Attributes:
        runs: int32 [R], column-major at source resolution, background first, mirrored where the image is.
        offsets: int64 [M + 1] into runs.
        image: int64 [M], the image in the batch that each mask belongs to, ascending.
        counts: number of masks of each image, as integers on the host: reading them does not wait for the
            device.
        sizes: int64 [M, 2], height and width of the mask's source image, or of its window.
        taken: int64 [M, 2], rows and columns of the padded square that the image fills.
        image_size: pixels of the padded square.
    """

    runs: Tensor
    offsets: Tensor
    image: Tensor
    counts: tuple[int, ...]
    sizes: Tensor
    taken: Tensor
    image_size: int

    def __repr__(self) -> str:
        return (
            f"RaggedMasks({len(self):,} masks of {len(self.counts)} images, {len(self.runs):,} runs, "
            f"frame of {self.image_size} pixels, {self.runs.device})"
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def dense(self, size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Pixels in the padded square at `size` (image_size if None): uint8 [M, size, size] on this device.

        The result is the same on every device, bit for bit: see sa1b.masks.grid. On a CUDA device nothing is
        copied, and the host does not wait where the Triton kernels are proved (sa1b.masks.proved).

        Raises:
            sa1b.masks.SizeError: `size` is not a valid size of a square in pixels.
        """
        size = self._size(size)
        if self.runs.device.type != "cpu":
            rasterize = _back_end(self.runs.device.type).rasterize_frame
            masks = (self.runs, self.offsets, *self.sizes.unbind(1))
            pixels: Tensor = rasterize(*masks, self.image_size, size, taken=self.taken, out=out)
            return pixels
        if out is None:
            out = fresh((len(self), size, size))
        for job in self.raster_jobs(size, out):
            job()
        return out

    def empty(self, size: int | None = None) -> Tensor:
        """Which masks have no pixel in the padded square at `size` (image_size if None): bool [M].

        `dense` may read none of the source pixels of a small mask. The mask stays in the batch, with its
        point, box and scores, as a target without foreground. Leave it out of the loss, or exclude such masks
        with `Stream(min_pixels=)`. The result is computed from the runs, without pixels, and equals
        `~(self.dense(size) != 0).flatten(1).any(1)`.

        Raises:
            sa1b.masks.SizeError: `size` is not a valid size of a square in pixels.
        """
        heights, widths = self.sizes.unbind(1)
        size = self._size(size)
        return raster_torch.empty_frames(
            self.runs, self.offsets, heights, widths, self.image_size, size=size, taken=self.taken
        )

    def _size(self, size: int | None) -> int:
        return self.image_size if size is None else check_size(size, size)[0]

    def raster_jobs(
        self, size: int, out: Tensor, boxes: npt.NDArray[np.int64] | None = None
    ) -> list[Callable[[], object]]:
        """The work of `dense` on a CPU as one call per image, which fills its masks in `out`, uint8 [M, size,
        size]. `boxes`, int64 [M, 4], are the parts of `out` that are not 0: see
        `sa1b.masks.raster.rasterize_frame`.
        """
        # The compiled function takes the masks of one image, which are contiguous.
        jobs: list[Callable[[], object]] = []
        for start, stop in pairwise(accumulate(self.counts, initial=0)):
            if start < stop:
                height, width = self.sizes[start].tolist()
                offsets = self.offsets[start : stop + 1].numpy()
                runs = self.runs[offsets[0] : offsets[-1]].numpy().view(np.uint32)
                image_runs = Runs(runs, offsets - offsets[0], height, width)
                rows, columns = self.taken[start].tolist()
                job = partial(
                    raster.rasterize_frame, image_runs, self.image_size, size, taken=(rows, columns)
                )
                known = None if boxes is None else boxes[start:stop]
                jobs.append(partial(job, out=out[start:stop].numpy(), boxes=known))
        return jobs


@dataclass(frozen=True, slots=True, eq=False)
class PaddedMasks(Tensors):
    """The masks of a batch with one row for each image: B images of N masks, N of the image with most.

    Attributes:
        masks: uint8 [B, N, size, size], pixels in the padded square.
        points: float32 [B, N, 2], as `Batch.points`.
        boxes: float32 [B, N, 4], as `Batch.boxes`.
        index: int64 [B, N], the mask's index among the M masks of the batch; -1: there is none, and masks,
            points and boxes are 0.
        valid: bool [B, N], whether there is a mask, and its image is valid (`Batch.valid`).
    """

    masks: Tensor
    points: Tensor
    boxes: Tensor
    index: Tensor
    valid: Tensor


def padded_index(counts: tuple[int, ...]) -> Tensor:
    """`PaddedMasks.index`, on the host, for images with these numbers of masks."""
    columns = torch.arange(max(counts, default=0))
    number = torch.tensor(counts, dtype=torch.int64)[:, None]
    return torch.where(columns < number, number.cumsum(0) - number + columns, -1)


def _back_end(device_type: str) -> ModuleType:
    """Triton's kernels on a CUDA device where they are proved, else plain torch. Results are identical."""
    if device_type != "cuda" or not raster_in_use():
        return raster_torch
    return import_module("sa1b.masks.raster_triton")
