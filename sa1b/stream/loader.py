"""`sa1b.Loader`: the stream read by threads of one process, batches ready on the device ahead of time.

    loader = sa1b.Loader(stream, threads=8, device="cuda", dense=256)
    for batch in loader:
        ...
        save({"stream": loader.state_dict()})

Reading, decoding JPEG and zstandard and walking runs release the GIL, so threads share one copy of the
sample table and write images straight into the batch's memory: pinned buffers on their way to a GPU, guarded
by events. Copies and rasters run on a stream of their own. The sequence is that of `sa1b.Stream` exactly.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from sa1b.stream.batch import Batch
from sa1b.stream.buffers import BufferPool, MaskBufferPool
from sa1b.stream.dataset import PendingBatch, Stream
from sa1b.stream.plan import MicroBatch
from sa1b.stream.sample import SampleMasks
from sa1b.workers import available_cpus

T = TypeVar("T")
_CUDA: Any = torch.cuda  # parts of it have no types


@dataclass(slots=True)
class _Buffer:
    """BufferPool for the images of one batch; on its way to a GPU until `copied` has happened."""

    images: Tensor
    copied: Any = None  # torch.cuda.Event


@dataclass(slots=True)
class _Pending:
    """A batch that threads are working on."""

    batch: PendingBatch
    buffer: _Buffer
    samples: list[Future[SampleMasks]]


class Pool:
    """Like ThreadPoolExecutor, whose threads it uses, with two queues.

    Masks that were drawn behind the samples of later batches would be ready when nothing is prepared ahead
    any more: in one queue a loader with `dense` makes a tenth fewer images a second.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sa1b-loader")
        self._jobs: PriorityQueue[tuple[bool, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._numbers = count()

    def submit(self, job: Callable[[], T], *, first: bool = False) -> "Future[T]":
        """Have a thread do it, behind what was submitted before; `first`: only behind what is first too."""
        future: Future[T] = Future()
        self._jobs.put((not first, next(self._numbers), future, job))
        self._threads.submit(self._work)
        return future

    def shutdown(self) -> None:
        """Wait for what is being done and drop the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        *_, future, job = self._jobs.get_nowait()  # there is one for each call
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)


class Loader:
    """Iterates over the batches of a stream, on `device`.

    Args:
        stream: what to read, and from which position on.
        threads: that read and decode; by default one for each CPU that this rank may use, see
            sa1b.workers.available_cpus.
        prefetch: batches worked on before they are asked for, at least 1.
        device: where batches go; "cuda" copies from pinned memory on a stream of its own.
        dense: also rasterise the masks on the device at this size: `batch.dense`, see `Batch`.
        read_only: you never write into `batch.dense`. On a CPU its memory is then cleared only where the
            masks before were, in a fifth of the time at 1024 pixels; what you write shows in later batches.
        stall_seconds: a sample that takes longer is named on stderr, with its shard.
        quiet: do not print the memory it takes.

    Raises:
        ValueError: threads or prefetch below 1, or a device that is not there.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        threads: int | None = None,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        dense: int | None = None,
        read_only: bool = False,
        stall_seconds: float = 60.0,
        quiet: bool = False,
    ) -> None:
        self.stream = stream
        self.threads = threads if threads is not None else available_cpus()
        self.prefetch = prefetch
        self.device = torch.device(device)
        self.dense = dense
        self.read_only = read_only
        self.stall_seconds = stall_seconds
        if self.threads < 1 or prefetch < 1:
            raise ValueError(f"threads={self.threads} and prefetch={prefetch} must be at least 1")
        self._cuda = self.device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise ValueError("device='cuda', but torch sees no GPU here; device='cpu' works everywhere")
        self._state = stream.state_dict()
        size = stream.options.image_size
        images = stream.plan.micro_batch
        # Those that are worked on, the caller's, and the one that it still holds while it asks for the next.
        self._images = BufferPool(images * size * size * 3, prefetch + 3)
        self._canvas = MaskBufferPool(images * stream.options.masks, dense or 0, 2)
        if not quiet:
            # On the way to a GPU one batch more is still being copied.
            kind, buffers = ("pinned", prefetch + 2) if self._cuda else ("ordinary", prefetch + 1)
            print(
                f"sa1b.Loader: {self.threads} threads, {buffers} batches of up to {images} images, "
                f"{buffers * images * size * size * 3 / 1e6:,.0f} MB of {kind} memory for images"
                + (f", {self._canvas.capacity / 1e6:,.0f} MB a batch for masks" if dense else "")
            )

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from where the loader stands; iterating again goes on behind the last one taken."""
        self.stream.position = self._state["position"]
        pieces = self.stream.plan.micro_batches(self.stream.position)
        free: deque[_Buffer] = deque()
        pending: deque[_Pending] = deque()
        side = _CUDA.Stream(self.device) if self._cuda else None
        pool = Pool(self.threads)
        try:
            while True:
                while len(pending) < self.prefetch + 1 and (piece := next(pieces, None)) is not None:
                    pending.append(self._submit(pool, piece, self._take_buffer(free)))
                if not pending:
                    return
                self._look(pending)
                one = pending.popleft()
                batch = self._finish(one, side, pool)
                if self._cuda:
                    free.append(one.buffer)
                self._state = self.stream.state_dict(batch)
                yield batch
        finally:
            for one in pending:
                one.batch.cancel()
            pool.shutdown()
            self.stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Where to go on behind the last batch that was taken; prefetched ones do not count."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; see `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._state = self.stream.state_dict()

    def stats(self) -> dict[str, Any]:
        """What each stage did since the stream was made, and which one limits; see sa1b.stream.stats."""
        return self.stream.stats.snapshot()

    def _take_buffer(self, free: deque[_Buffer]) -> _Buffer:
        # The oldest buffer's copy ended long ago, or ends first.
        if len(free) > 1:
            buffer = free.popleft()
            buffer.copied.synchronize()
            return buffer
        size = self.stream.options.image_size
        shape = (self.stream.plan.micro_batch, size, size, 3)
        # In ordinary memory the batch itself is the buffer, and the caller's for as long as it is held.
        return _Buffer(
            torch.empty(shape, dtype=torch.uint8, pin_memory=True) if self._cuda else self._images.take(shape)
        )

    def _submit(self, pool: Pool, piece: MicroBatch, buffer: _Buffer) -> _Pending:
        pending = self.stream.submit(piece)
        samples = [pool.submit(partial(_load, pending, i, buffer.images)) for i in range(len(pending))]
        return _Pending(pending, buffer, samples)

    def _finish(self, one: _Pending, side: Any, pool: Pool) -> Batch:
        began = time.perf_counter()
        self._watch(one)
        self.stream.stats.waited(time.perf_counter() - began)
        samples = [future.result() for future in one.samples]
        images = one.buffer.images[: len(samples)]
        with self.stream.stats.busy("collate"):
            batch = one.batch.collate(images, samples)
        if side is None:
            with self.stream.stats.busy("device"):
                return self._dense(batch, pool) if self.device.type == "cpu" else self._on_device(batch)
        with self.stream.stats.busy("device", images.numel()), torch.cuda.stream(side):
            # The images lie in pinned memory already; the ragged rest is small.
            batch = self._on_device(
                batch.pack(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
            )
            one.buffer.copied = _CUDA.Event()
            one.buffer.copied.record(side)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(side)
        batch.record_stream(current)
        return batch

    def _dense(self, batch: Batch, pool: Pool) -> Batch:
        """With the masks as pixels, drawn by the loader's threads."""
        if self.dense is None:
            return batch
        out, boxes = self._canvas.take_drawn(len(batch.masks))
        drawings = batch.masks.drawings(self.dense, out, boxes if self.read_only else None)
        for drawing in [pool.submit(draw, first=True) for draw in drawings]:
            drawing.result()
        return replace(batch, dense=out)

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        return batch if self.dense is None else replace(batch, dense=batch.masks.dense(self.dense))

    def _look(self, pending: deque[_Pending]) -> None:
        """Count what waits where."""
        futures = [future for one in pending for future in one.samples]
        waiting = sum(not future.running() and not future.done() for future in futures)
        ready = sum(all(future.done() for future in one.samples) for one in pending)
        self.stream.stats.queued("read", waiting)
        self.stream.stats.queued("collate", min(ready, self.prefetch))

    def _watch(self, one: _Pending) -> None:
        """Wait for the samples of a batch; name those that take suspiciously long."""
        left = set(one.samples)
        while left:
            done, left = wait(left, timeout=self.stall_seconds, return_when="FIRST_EXCEPTION")
            if any(future.exception() for future in done):
                return
            if not done:
                stalled = next(i for i, future in enumerate(one.samples) if future in left)
                where = self.stream.where(one.batch.rows[stalled])
                print(f"sa1b.Loader: waiting for {where} for over {self.stall_seconds:g} s", file=sys.stderr)


def _load(pending: PendingBatch, i: int, images: Tensor) -> SampleMasks:
    (sample,) = pending.decode([pending.pick(i)], images[i, None])
    return sample
