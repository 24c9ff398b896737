"""The last stage of a loader: a batch in its slot of memory becomes the caller's batch, on its device.

On a CPU the tensors of a batch are views of its slot, which is in use until the caller drops them. On a GPU
they are copies from page-locked memory, for which only the caller's stream waits. Dense masks are rasterised
here, on a CPU in reused buffers: the masks of an image at 1024 pixels take 2.5 ms there, 9 in new memory.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.ragged import Tensors

HELD = 3  # batches of the caller that stay in slots: further ones are copied
_CUDA: Any = torch.cuda  # some of its functions are untyped
_BOX = 32  # bytes of the edges of a box, int64: top, bottom, left, right


class MaskBufferPool:
    """Buffers for dense masks, reused when their last tensor is unreferenced. The boxes of the masks before
    their pixels say which parts are not 0. Size and number of the buffers grow with what a caller holds.
    """

    def __init__(self, masks: int, size: int, keep: int) -> None:
        self.capacity = 0  # bytes of a buffer
        self._most, self._masks, self._size, self._keep = masks, 0, size, keep
        self._free = deque[npt.NDArray[np.uint8]]()
        self._lent: dict[int, None] = {}  # id of each buffer that is referenced
        self._limit = 2  # buffers that are kept, referenced or not

    def take_known(self, masks: int) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Pixels uint8 [masks, size, size], and their boxes int64 [masks, 4] for `raster.rasterize_frame`."""
        if masks > self._masks:
            self._masks = max(masks, min(self._most, masks * 5 // 4))
            self.capacity = self._masks * (_BOX + self._size**2)
            self._free.clear()
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = np.zeros(self.capacity, np.uint8)
        self._limit = max(self._limit, len(self._lent) + 1)
        self._lent[id(buffer)] = None
        head = self._masks * _BOX
        boxes = buffer[:head].view(np.int64).reshape(-1, 4)[:masks]
        pixels = buffer[head : head + masks * self._size**2]
        weakref.finalize(pixels, self._take_back, buffer).atexit = False
        return torch.from_numpy(pixels).view(masks, self._size, self._size), boxes

    def spare(self) -> bool:
        """Whether `take_known` needs no more buffers than were referenced at a time before."""
        return len(self._lent) < self._limit

    def _take_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        # Without a lock: any thread may run it, also while it holds one.
        self._lent.pop(id(buffer), None)
        kept = len(self._free) + len(self._lent) < self._limit and len(self._free) < self._keep
        if kept and len(buffer) == self.capacity:
            self._free.append(buffer)


class SideStream:
    """A CUDA stream for copying and rasterising in parallel with the caller's stream."""

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

    def page_lock(self, memory: npt.NDArray[np.uint8]) -> None:
        """Page-lock memory until it is freed, so that copies from it need not wait."""
        runtime, start = _CUDA.cudart(), memory.ctypes.data
        if code := int(runtime.cudaHostRegister(start, memory.nbytes, 0)):
            raise Sa1bError(
                f"memory of a loader ({memory.nbytes:,} bytes): cannot be page-locked, CUDA error {code}; "
                "pass fewer processes, a smaller prefetch or a smaller micro_batch"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, start).atexit = False

    def copy(self, batch: Batch) -> Batch:
        return batch.to(self.device)

    def event(self) -> Any:
        """An event after all work that was submitted so far."""
        return self._stream.record_event()

    def hand_over(self, batch: Tensors, ready: Any) -> None:
        """Make the caller's current stream wait for an event, and the allocator for the caller's stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        batch.record_stream(current)


class DeviceStage:
    """Brings batches of a stream to `device`, with masks of `dense` pixels in up to `keep` buffers."""

    def __init__(
        self, stream: BatchStream, device: torch.device, dense: int | None, *, read_only: bool, keep: int
    ) -> None:
        self.device, self.dense, self.read_only, self.stats = device, dense, read_only, stream.stats
        self._masks = MaskBufferPool(stream.plan.micro_batch * stream.options.masks, dense or 0, keep)
        self.side: SideStream | None = None  # one: torch's allocator reuses memory on the same stream only
        self._raster: ThreadPoolExecutor
        self._memory = np.empty(0, np.uint8)
        self._held = set[int]()  # slots of batches that the caller has, or that are on their way to it
        self._copying = deque[tuple[Any, int]]()  # events of copies to a GPU, and the slots that they read

    @contextmanager
    def used(self, memory: npt.NDArray[np.uint8], threads: int) -> Iterator[None]:
        """A context for one iteration, whose slots are parts of `memory`; `threads` rasterise on a CPU."""
        if self.device.type == "cuda" and self.side is None:
            self.side = SideStream(self.device)
        if memory is not self._memory:
            self._memory, self._held, self._copying = memory, set(), deque()
            if self.side is not None:
                self.side.page_lock(memory)
        pool = self._raster = ThreadPoolExecutor(threads, thread_name_prefix="sa1b-loader-raster")
        try:
            yield
        finally:
            pool.shutdown(cancel_futures=True)

    def slots_in_use(self) -> set[int]:
        """The slots of the caller's batches, and of those that are on their way to it."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        return self._held | {slot for _, slot in self._copying}

    def wait_for_copy(self) -> bool:
        """Wait until the oldest copy to a GPU has ended; return False if there is none."""
        if self._copying:
            self._copying[0][0].synchronize()
        return bool(self._copying)

    def begin(
        self, batch: Batch, memory: npt.NDArray[np.uint8], slot: int, *, ahead: bool
    ) -> Callable[[], Batch]:
        """Begin to copy and to rasterise a batch in the memory of a slot; the result waits for the end."""
        began = time.perf_counter()
        if self.side is not None:
            ready = self._copy(batch, slot, self.side)
        elif self.device.type == "cpu":
            if len(self._held) >= HELD:
                batch = batch.map_tensors(lambda name, tensor: tensor.clone())
            else:
                self._held.add(slot)
                weakref.finalize(memory, self._held.discard, slot).atexit = False
            ready = self._rasterise(batch, ahead=ahead)
        else:
            dense = None if self.dense is None else batch.masks.dense(self.dense)
            ready = partial(replace, replace(batch, dense=dense).to(self.device, non_blocking=False))
        self.stats.add("device", batch.images.nbytes, time.perf_counter() - began)
        return ready

    def _copy(self, batch: Batch, slot: int, side: SideStream) -> Callable[[], Batch]:
        with side.current():
            there = side.copy(batch)
            self._copying.append((side.event(), slot))
            if self.dense is not None:
                there = replace(there, dense=there.masks.dense(self.dense))
            end = side.event()

        def ready() -> Batch:
            side.hand_over(there, end)
            return there

        return ready

    def _rasterise(self, batch: Batch, *, ahead: bool) -> Callable[[], Batch]:
        if self.dense is None:
            return lambda: batch
        # A batch ahead is begun by a thread: by then, the caller has replaced its last batch by this one.
        begun = self._raster.submit(lambda: self._masks.spare() and self._begin(batch)) if ahead else None

        def ready() -> Batch:
            out, rows = (begun and begun.result()) or self._begin(batch)
            for row in rows:
                self.stats.add("device", 0, row.result(), items=0)
            return replace(batch, dense=out)

        return ready

    def _begin(self, batch: Batch) -> tuple[Tensor, list[Future[float]]]:
        """Begin to rasterise the masks of each image; the jobs return their seconds."""
        out, boxes = self._masks.take_known(len(batch.masks))
        jobs = batch.masks.raster_jobs(out.shape[-1], out, boxes if self.read_only else None)
        return out, [self._raster.submit(_timed, job) for job in jobs]


def _timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began
