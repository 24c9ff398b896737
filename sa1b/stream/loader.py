"""`sa1b.Loader`: the stream read by threads of one process; batches are complete on the device in advance.

    loader = sa1b.Loader(stream, threads=8, device="cuda", dense=256)
    for epoch in range(3):
        for batch in loader:
            ...
            save({"stream": loader.state_dict()})

One iteration is one epoch, and the next iteration is the next epoch. With `Stream(epochs=None)` an iteration
does not end.

Three stages, each of which works on later batches than the next one:

    pick        waits for a sample's bytes, which are read in the background, and chooses its masks
    decode      the JPEG, straight into the batch's memory: pinned on the way to a GPU
    to device   collates, packs, copies to the GPU on a stream of its own and rasterises; on a CPU rasterises

One pool of threads does all of it, the oldest batch first: reading, decoding JPEG and zstandard and walking
runs release the GIL, so threads share one copy of the sample table. The caller only waits for a batch to be
complete, and makes its own CUDA stream wait for it. The sequence is that of `sa1b.Stream` exactly.

A caller that computes for 0.4 s a batch of 8 images of 1500 pixels with 32 masks at 256 waits 1.3 ms for each
batch (median, 3 threads, on a CPU); where collating and rasterising began with its request it waited 16 ms.
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any

import torch
from torch import Tensor

from sa1b.stream.batch import Batch, RaggedMasks
from sa1b.stream.buffers import BufferPool, MaskBufferPool, PinnedBuffer, SideStream
from sa1b.stream.dataset import Stream
from sa1b.stream.pending import PendingBatch, PickedSample
from sa1b.stream.plan import MicroBatch
from sa1b.stream.sample import SampleMasks
from sa1b.workers import available_cpus

_PICK, _DECODE, _DEVICE, _RASTER = range(4)  # what a job does, and
_STAGES = ("read", "decode", "collate", "device")  # the stage before which it waits, see sa1b.stream.stats


class Pool:
    """Like ThreadPoolExecutor, whose threads it uses, with priorities.

    Args:
        threads: how many.
        begin: called by each of them before its first job.
    """

    def __init__(self, threads: int, begin: Callable[[], object] | None = None) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sa1b-loader", initializer=begin)
        self._jobs: PriorityQueue[tuple[tuple[int, int], int, Callable[[], object]]] = PriorityQueue()
        self._numbers = count()

    def submit(self, job: Callable[[], object], priority: tuple[int, int]) -> None:
        """Have a thread do the job: those of the smallest priority first, equal ones in order.

        What a job returns or raises is lost.
        """
        self._jobs.put((priority, next(self._numbers), job))
        self._threads.submit(self._work)

    def waiting(self) -> list[tuple[int, int]]:
        """The priorities of the jobs that no thread has begun."""
        with self._jobs.mutex:
            return [priority for priority, _, _ in self._jobs.queue]

    def shutdown(self) -> None:
        """Wait for the jobs that threads have begun and drop the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._jobs = PriorityQueue()  # the jobs refer to their owner, which refers to the pool

    def _work(self) -> None:
        *_, job = self._jobs.get_nowait()  # there is one for each call
        job()


@dataclass(slots=True, eq=False)
class _Work:
    """A batch that threads are working on.

    Attributes:
        number: of the batch, counted from the first of the iteration.
        pending: its samples as they are read.
        images: uint8 [B, S, S, 3], where the decoder writes.
        pinned: the memory of the batch on the way to a GPU.
        picked, samples: what pick and decode returned, None for what is not done.
        left: jobs of the current stage that are not done, where the next stage needs all of them.
        errors: by sample. The batch fails with the first one in the order of its samples.
        result: the complete batch, and the event after which it is on its GPU.
    """

    number: int
    pending: PendingBatch
    images: Tensor
    pinned: PinnedBuffer | None
    picked: list[PickedSample | None]
    samples: list[SampleMasks | None]
    left: int
    errors: dict[int, BaseException] = field(default_factory=dict)
    result: "Future[tuple[Batch, Any]]" = field(default_factory=Future)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_last(self) -> bool:
        """Count a finished job; True for the last one."""
        with self._lock:
            self.left -= 1
            return self.left == 0

    def unfinished(self) -> list[int]:
        """The samples that are not decoded."""
        return [i for i, sample in enumerate(self.samples) if sample is None]

    def fail(self) -> None:
        """End the batch with its first error, once the samples before that one are done."""
        with self._lock:
            for i, sample in enumerate(self.samples):
                if i in self.errors and not self.result.done():
                    self.result.set_exception(self.errors[i])
                if i in self.errors or sample is None:
                    return


class _Pipeline:
    """The three stages of one iteration. Only its pool's threads and one caller use it."""

    def __init__(self, loader: "Loader") -> None:
        self.loader = loader
        self.stream, self.decoder = loader.stream, loader.stream.decoder
        self.stats = loader.stream.stats
        self.side = SideStream(loader.device) if loader.device.type == "cuda" else None
        if self.side is not None and loader.dense is not None:
            with self.side.current():  # compiles kernels in one thread, before there are several
                _one_mask(self.stream.options.image_size).to(self.side.device).dense(loader.dense)
        self.pool = Pool(loader.threads, self.side.begin_thread if self.side else None)
        self.pending: deque[_Work] = deque()
        self.free: deque[PinnedBuffer] = deque()
        self.numbers = count()

    def submit(self, piece: MicroBatch) -> None:
        """Start to work on a micro-batch."""
        pending = self.stream.submit(piece)
        size, samples = self.stream.options.image_size, len(pending)
        shape, pinned = (self.stream.plan.micro_batch, size, size, 3), None
        if self.side is None:
            # The batch itself is the buffer, and the caller's for as long as it is held.
            images = self.loader._images.take(shape)[:samples]
        else:
            there = self.decoder.device.type != "cpu"
            pinned = self.free.popleft() if self.free else PinnedBuffer(self.side, (0,) if there else shape)
            images = self.side.empty((samples, *shape[1:])) if there else pinned.images[:samples]
        work = _Work(
            number=next(self.numbers),
            pending=pending,
            images=images,
            pinned=pinned,
            picked=[None] * samples,
            samples=[None] * samples,
            left=samples,
        )
        self.pending.append(work)
        for i in range(samples):
            self._start(work, _PICK, partial(self._pick, work, i), i)
        if not samples:  # a rank's part of a short step
            self._start(work, _DEVICE, partial(self._to_device, work))

    def take(self) -> Batch:
        """The oldest batch, once it is complete."""
        work = self.pending[0]
        began = time.perf_counter()
        self._wait(work)
        self.stats.waited(time.perf_counter() - began)
        batch, ready = work.result.result()
        self.pending.popleft()
        if self.side is not None:
            self.side.hand_over(batch, ready)
            if work.pinned is not None:
                self.free.append(work.pinned)
        return batch

    def look(self) -> None:
        """Note what waits before each stage."""
        waiting = Counter(_STAGES[-stage] for _, stage in self.pool.waiting())
        self.stats.look(waiting, sum(work.result.done() for work in self.pending))

    def close(self) -> None:
        """End what is in flight."""
        for work in self.pending:
            work.pending.cancel()
        self.pool.shutdown()

    def _start(self, work: _Work, stage: int, job: Callable[[], object], i: int | None = None) -> None:
        # The oldest batch first, and of a batch the latest stage.
        self.pool.submit(partial(self._run, work, i, job), (work.number, -stage))

    def _run(self, work: _Work, i: int | None, job: Callable[[], object]) -> None:
        if work.result.done():  # with an error
            return
        try:
            job()
        except BaseException as error:
            if i is None:
                work.result.set_exception(error)
            else:
                work.errors[i] = error
        if work.errors:
            work.fail()

    def _pick(self, work: _Work, i: int) -> None:
        work.picked[i] = work.pending.pick(i)
        if not self.decoder.batched:
            self._start(work, _DECODE, partial(self._decode, work, i, i + 1), i)
        elif work.is_last():
            work.left = 1
            self._start(work, _DECODE, partial(self._decode, work, 0, len(work.picked)))

    def _decode(self, work: _Work, start: int, stop: int) -> None:
        if work.pinned is not None:
            work.pinned.wait()
        picked = [one for one in work.picked[start:stop] if one is not None]
        work.picked[start:stop] = [None] * (stop - start)  # the JPEG's bytes
        with self._submitting():
            work.samples[start:stop] = work.pending.decode(picked, work.images[start:stop])
        if work.is_last():
            self._start(work, _DEVICE, partial(self._to_device, work))

    def _submitting(self) -> AbstractContextManager[object]:
        """What a thread submits to the GPU goes to the side stream."""
        return nullcontext() if self.side is None else self.side.current()

    def _to_device(self, work: _Work) -> None:
        dense, device, ready = self.loader.dense, self.loader.device, None
        with self.stats.busy("collate"):
            batch = work.pending.collate(work.images, [one for one in work.samples if one is not None])
        if device.type == "cpu" and dense is not None:
            self._rasterise(work, batch, dense)
            return
        with self.stats.busy("device", work.images.nbytes), self._submitting():
            if self.side is None or work.pinned is None:
                batch = batch.to(device)
            else:
                batch = self.side.copy(batch.pack(work.pinned.small))
                work.pinned.copied()
            if dense is not None:
                batch = replace(batch, dense=batch.masks.dense(dense))
            if self.side is not None:
                ready = self.side.event()
        work.result.set_result((batch, ready))

    def _rasterise(self, work: _Work, batch: Batch, size: int) -> None:
        """Have the threads make the dense masks of a batch on the CPU, image by image."""
        with self.stats.busy("device", batch.images.nbytes):
            out, boxes = self.loader._masks.take_known(len(batch.masks))
            batch = replace(batch, dense=out)
            jobs = batch.masks.raster_jobs(size, out, boxes if self.loader.read_only else None)
        if not jobs:
            work.result.set_result((batch, None))
        work.left = len(jobs)
        for job in jobs:
            self._start(work, _RASTER, partial(self._rasterise_image, work, batch, job))

    def _rasterise_image(self, work: _Work, batch: Batch, job: Callable[[], object]) -> None:
        with self.stats.busy("device", items=0):
            job()
        if work.is_last():
            work.result.set_result((batch, None))

    def _wait(self, work: _Work) -> None:
        """Wait for a batch; name a sample if none of the batch is finished for suspiciously long."""
        unfinished, seconds = work.unfinished(), self.loader.stall_seconds
        while not wait([work.result], timeout=seconds).done:
            before, unfinished = unfinished, work.unfinished()
            if len(unfinished) == len(before):
                rows = work.pending.rows
                what = self.stream.where(rows[unfinished[0]]) if unfinished else "a batch to reach the device"
                print(f"sa1b.Loader: waiting for {what} for over {seconds:g} s", file=sys.stderr)


def _one_mask(image_size: int) -> RaggedMasks:
    """A mask without foreground of one image."""
    sides, zero = torch.full((1, 2), image_size), torch.zeros(1, dtype=torch.int64)
    return RaggedMasks(
        runs=torch.full((1,), image_size**2, dtype=torch.int32),
        offsets=torch.arange(2),
        image=zero,
        counts=(1,),
        sizes=sides,
        taken=sides,
        image_size=image_size,
    )


class Loader:
    """Iterates over the batches of a stream, on `device`.

    Args:
        stream: what to read, and from which position on.
        threads: that read and decode; by default one for each CPU that this rank may use, see
            sa1b.workers.available_cpus.
        prefetch: batches that are worked on or complete while the caller uses another one, at least 1.
        device: where batches go; "cuda" copies from pinned memory on a stream of its own.
        dense: also rasterise the masks on the device at this size: `batch.dense`, see `Batch`.
        read_only: the caller never writes into `batch.dense`. On a CPU its memory is then cleared only where
            the masks before were, in a fifth of the time at 1024 pixels; what is written there shows in later
            batches.
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
        if stream.decoder.device.type not in ("cpu", self.device.type):
            raise ValueError(
                f"decoder={stream.options.decoder!r} writes images on {stream.decoder.device}, "
                f"not on {self.device}: pass device={stream.decoder.device.type!r}"
            )
        self._state = stream.state_dict()
        size = stream.options.image_size
        images = stream.plan.micro_batch
        # Those in flight, the caller's, and the one that it still holds while it asks for the next.
        self._images = BufferPool(images * size * size * 3, prefetch + 3)
        self._masks = MaskBufferPool(images * stream.options.masks, dense or 0, prefetch + 3)
        if not quiet:
            print(f"sa1b.Loader: {self.threads} threads, {self._memory()}")

    def __iter__(self) -> Generator[Batch, None, None]:
        """The batches of one epoch, the next one in each iteration; see `Stream` for epochs=None."""
        begun = self.stream.begin()
        self._state = {**self.stream.state_dict(), "position": begun}
        pieces = self.stream.plan.micro_batches(begun)
        pipeline = _Pipeline(self)
        try:
            while True:
                while len(pipeline.pending) < self.prefetch + 1 and (piece := next(pieces, None)) is not None:
                    pipeline.submit(piece)
                if not pipeline.pending:
                    return
                pipeline.look()
                batch = pipeline.take()
                self._state = self.stream.state_dict(batch)
                self.stream.taken(batch)
                yield batch
        finally:
            pipeline.close()
            self.stream.close()

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch. Raises TypeError for an endless stream (epochs=None)."""
        return len(self.stream)

    @property
    def steps_per_epoch(self) -> int:
        """See `Stream.steps_per_epoch`."""
        return self.stream.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration begin at the start of this epoch; see `Stream.set_epoch`."""
        self.stream.set_epoch(epoch)
        self._state = self.stream.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where to resume: after the last batch that was taken; prefetched ones do not count."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a state was taken; see `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._state = self.stream.state_dict()

    def stats(self) -> dict[str, Any]:
        """What each stage did since the stream was made, and which one limits; see sa1b.stream.stats."""
        return self.stream.stats.snapshot()

    def _memory(self) -> str:
        """The memory that batches take."""
        size, images = self.stream.options.image_size, self.stream.plan.micro_batch
        image_bytes = images * size * size * 3
        mask_bytes = images * self.stream.options.masks * (self.dense or 0) ** 2
        # While the caller asks for the next batch it holds one, and prefetch + 1 are in flight.
        whole = self.prefetch + 2
        text = f"{whole} batches of up to {images} images, {whole * image_bytes / 1e6:,.0f} MB for images"
        if self.dense:
            text += f" and {whole * mask_bytes / 1e6:,.0f} MB for masks"
        if self.device.type == "cpu":
            return text + " of memory"
        return f"{text} on the device, {(self.prefetch + 1) * image_bytes / 1e6:,.0f} MB of pinned memory"
