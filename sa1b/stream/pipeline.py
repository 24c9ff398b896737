"""The three stages from a stream to complete batches, run by one pool of threads; see `Loader`."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.limit import Outcome
from sa1b.storage.errors import UnavailableError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.pending import PendingBatch
from sa1b.stream.plan import MicroBatch
from sa1b.stream.ragged import BufferPool, MaskBufferPool, PinnedBuffer, RaggedMasks, SideStream

_PICK, _DECODE, _DEVICE, _RASTER = range(4)  # the kinds of jobs
_STAGES = ("read", "decode", "collate", "device")  # kind -> stage that counts it, see sa1b.stream.stats
_DONE = ("read", "decoded", "collated and copied", "rasterised")  # kind -> state of a sample after the job
_LATE = 5.0  # seconds after the deadline in which a read ends by itself with its own error
_CLOSING = 5.0  # seconds that the end of an iteration waits for threads


class StalledError(Sa1bError):
    """A thread of a loader hangs; the message names the sample and the stage."""


class Pool:
    """A ThreadPoolExecutor with priorities."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sa1b-loader")
        self._jobs: PriorityQueue[tuple[tuple[int, int], int, Callable[[], object]]] = PriorityQueue()
        self._numbers = count()
        self._ended = False

    def submit(self, job: Callable[[], object], priority: tuple[int, int]) -> None:
        """Run a job, smaller priorities first, equal ones in order; drop it after `shutdown`. Its result or
        exception is discarded.
        """
        self._jobs.put((priority, next(self._numbers), job))
        try:
            self._threads.submit(self._work)
        except RuntimeError:  # also if no thread can be started
            if not self._ended:
                raise

    def waiting(self) -> list[tuple[int, int]]:
        """The priorities of the jobs that no thread has started."""
        with self._jobs.mutex:
            return [priority for priority, _, _ in self._jobs.queue]

    def shutdown(self) -> None:
        """Drop the jobs that no thread has started, and wait some seconds for the others: one may hang."""
        self._ended = True
        ending = threading.Thread(
            target=partial(self._threads.shutdown, wait=True, cancel_futures=True), daemon=True
        )
        ending.start()
        ending.join(_CLOSING)
        self._jobs = PriorityQueue()  # the jobs refer to their owner, which refers to the pool

    def _work(self) -> None:
        *_, job = self._jobs.get_nowait()  # each call has one
        job()


class _Job(NamedTuple):
    """A job in a thread: when it began (time.monotonic), its kind, its batch and sample."""

    began: float
    stage: int
    work: PendingBatch
    i: int | None


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSettings:
    """Settings and memory that the iterations of one loader share; see `sa1b.stream.loader.Loader`."""

    stream: BatchStream
    threads: int
    device: torch.device
    dense: int | None
    read_only: bool
    stall_seconds: float
    images: BufferPool  # memory for the images of batches on the CPU
    masks: MaskBufferPool  # memory for the dense masks of batches on the CPU


class BatchPipeline:
    """The three stages of one iteration. Only its pool's threads and one caller use it. `side` is the stream
    of all iterations for copies to a GPU; None on a CPU.
    """

    def __init__(self, settings: PipelineSettings, side: SideStream | None) -> None:
        self.settings = settings
        self.stream, self.decoder = settings.stream, settings.stream.decoder
        self.stats = settings.stream.stats
        self.side = side
        if self.side is not None and settings.dense is not None:
            with self.side.current():  # compiles kernels in one thread before other threads need them
                _one_mask(self.stream.options.image_size).to(self.side.device).dense(settings.dense)
        self.pool = Pool(settings.threads)
        self.pending: deque[PendingBatch] = deque()
        self.free: deque[PinnedBuffer] = deque()
        self.numbers = count()
        # Dense masks on the CPU are rasterised in the order of the batches: for the one that the caller waits
        # for, and for the next while memory is spare.
        self._collated: dict[
            int, tuple[PendingBatch, Batch]
        ] = {}  # number -> a batch without dense masks yet
        self._next_dense, self._waited_for, self._lock = 0, -1, threading.Lock()
        self._running: dict[int, _Job] = {}  # thread -> its job
        self._limit = self.stream.deadline + _LATE

    def submit(self, piece: MicroBatch) -> None:
        """Start reading and decoding a micro-batch."""
        work = self.stream.submit(piece)
        work.number = next(self.numbers)
        size, samples = self.stream.options.image_size, len(work)
        shape = (self.stream.plan.micro_batch, size, size, 3)
        if self.side is None:
            # The batch is a view of the buffer, which is not reused while the caller references it.
            work.images = self.settings.images.take(shape)[:samples]
        else:
            there = self.decoder.device.type != "cpu"
            pinned = self.free.popleft() if self.free else PinnedBuffer(self.side, (0,) if there else shape)
            work.images = self.side.empty((samples, *shape[1:])) if there else pinned.images[:samples]
            work.pinned = pinned
        self.pending.append(work)
        for i in range(samples):
            self._start(work, _PICK, partial(self._pick, work, i), i)
        if not samples:  # an empty micro-batch of a short step
            self._start(work, _DEVICE, partial(self._to_device, work))

    def take(self) -> Batch:
        """The oldest batch, once it is complete."""
        work = self.pending[0]
        began = time.perf_counter()
        self._waited_for = work.number
        self._rasterise_next()
        self._wait(work)
        self.stats.waited(time.perf_counter() - began)
        batch, ready = work.outcome.result()
        self.pending.popleft()
        # In a thread: by then, the caller has replaced its last batch by this one.
        if self._collated:
            self.pool.submit(self._rasterise_next, (work.number, -_RASTER))
        if self.side is not None:
            self.side.hand_over(batch, ready)
            if work.pinned is not None:
                self.free.append(work.pinned)
        return batch

    def look(self) -> None:
        """Record the number of jobs that wait before each stage."""
        waiting = Counter(_STAGES[-stage] for _, stage in self.pool.waiting())
        ready = len(self._collated) + sum(work.outcome.done for work in self.pending)
        self.stats.look(waiting, ready)

    def reading(self) -> str | None:
        """The sample that the oldest incomplete batch waits for, with its shard; None if there is none."""
        for work in tuple(self.pending):
            if not work.outcome.done and len(work):
                return self._what(work)
        return None

    def close(self) -> None:
        """Cancel the batches in flight and stop the threads."""
        for work in self.pending:
            work.cancel()
        self.pool.shutdown()
        # Errors refer to the frames of their jobs, which refer to the batches: their memory would stay until
        # the next garbage collection.
        for work in self.pending:
            work.errors.clear()
            work.outcome = Outcome()
        self._collated.clear()

    def _start(self, work: PendingBatch, stage: int, job: Callable[[], object], i: int | None = None) -> None:
        # The oldest batch has priority; within a batch, the latest stage.
        self.pool.submit(partial(self._run, work, stage, i, job), (work.number, -stage))

    def _run(self, work: PendingBatch, stage: int, i: int | None, job: Callable[[], object]) -> None:
        if work.outcome.done:  # the batch has ended with an error
            return
        self._running[threading.get_ident()] = _Job(time.monotonic(), stage, work, i)
        try:
            if self.side is not None:
                self.side.begin_thread()
            with work.named() if stage == _DEVICE else nullcontext():
                job()
        except BaseException as error:
            if i is None or self.decoder.batched:
                work.fail(error)
            else:
                work.errors[i] = error
        finally:
            del self._running[threading.get_ident()]
        if work.errors:
            work.fail()
        self._rasterise_next()

    def _pick(self, work: PendingBatch, i: int) -> None:
        if not self.decoder.batched:
            work.pick(i)
            self._start(work, _DECODE, partial(self._decode, work, i, i + 1), i)
            return
        try:
            work.pick(i)
        except BaseException as error:
            work.errors[i] = error
        if work.is_last():  # a batched decoder waits for all samples: none is done before
            if work.errors:
                work.fail(work.errors[min(work.errors)])
            else:
                work.left = 1
                self._start(work, _DECODE, partial(self._decode, work, 0, len(work.picked)))

    def _decode(self, work: PendingBatch, start: int, stop: int) -> None:
        if work.pinned is not None:
            work.pinned.wait()
        with self._submitting():
            work.decode(start, stop)
        if work.is_last():
            self._start(work, _DEVICE, partial(self._to_device, work))

    def _submitting(self) -> AbstractContextManager[object]:
        """A context in which the calling thread submits to the side stream."""
        return nullcontext() if self.side is None else self.side.current()

    def _to_device(self, work: PendingBatch) -> None:
        dense, device, ready = self.settings.dense, self.settings.device, None
        with self.stats.busy("collate"):
            batch = work.collate()
        if device.type == "cpu" and dense is not None:
            self._collated[work.number] = work, batch  # rasterised at the end of this job or later
            return
        with self.stats.busy("device", work.images.nbytes), self._submitting():
            if self.side is None or work.pinned is None:
                batch = batch.to(device)
            else:
                work.pinned.wait()  # a batch without samples is not decoded
                batch = self.side.copy(batch.pack(work.pinned.small))
                work.pinned.copied()
            if dense is not None:
                batch = replace(batch, dense=batch.masks.dense(dense))
            if self.side is not None:
                ready = self.side.event()
        work.outcome.set((batch, ready))

    def _rasterise_next(self) -> None:
        """Rasterise the next collated batch, if the caller waits for it or memory is spare."""
        with self._lock:
            number, masks = self._next_dense, self.settings.masks
            if number not in self._collated or (number > self._waited_for and not masks.spare()):
                return
            work, batch = self._collated[number]
            memory = masks.take_known(len(batch.masks))
            del self._collated[number]
            self._next_dense += 1
        self._start(work, _DEVICE, partial(self._rasterise, work, batch, *memory))

    def _rasterise(self, work: PendingBatch, batch: Batch, out: Tensor, boxes: npt.NDArray[np.int64]) -> None:
        """Rasterise the dense masks of a batch on the CPU with all threads, one job per image."""
        with self.stats.busy("device", batch.images.nbytes):
            batch = replace(batch, dense=out)
            known = boxes if self.settings.read_only else None
            jobs = batch.masks.raster_jobs(out.shape[-1], out, known)
        if not jobs:
            work.outcome.set((batch, None))
        work.left = len(jobs)
        with_masks = (i for i, masks in enumerate(batch.masks.counts) if masks)
        for i, job in zip(with_masks, jobs, strict=True):
            self._start(work, _RASTER, partial(self._rasterise_image, work, batch, i, job), i)

    def _rasterise_image(self, work: PendingBatch, batch: Batch, i: int, job: Callable[[], object]) -> None:
        try:
            with self.stats.busy("device", items=0):
                job()
        except Exception as error:
            work.note(error, i)
            raise
        if work.is_last():
            work.outcome.set((batch, None))

    def _wait(self, work: PendingBatch) -> None:
        """Wait for a batch; log a sample that stalls. UnavailableError, StalledError: after the deadline."""
        unfinished, seconds, since = work.unfinished(), self.settings.stall_seconds, time.monotonic()
        while not work.outcome.wait(self._next(since + seconds) - time.monotonic()):
            now, job = time.monotonic(), self._oldest(work)
            if job is not None and now >= job.began + self._limit:
                raise self._overdue(job)
            if now < since + seconds:
                continue
            before, unfinished, since = unfinished, work.unfinished(), now
            if len(unfinished) == len(before):
                line = f"sa1b.Loader: waiting for {self._what(work)} for over {seconds:g} s"
                logging.getLogger("sa1b").warning(line)

    def _next(self, then: float) -> float:
        """When the caller looks at the threads again: then, or when a job is overdue."""
        return min([then, *(job.began + self._limit for job in list(self._running.values()))])

    def _oldest(self, work: PendingBatch) -> _Job | None:
        """The job that runs for the longest time, of a batch if a thread works on it, else of another one."""
        jobs = list(self._running.values())
        return min([job for job in jobs if job.work is work] or jobs, key=lambda job: job.began, default=None)

    def _what(self, work: PendingBatch) -> str:
        """What a batch waits for: a sample, and its stage after it was read."""
        job = self._oldest(work)
        if job is None or (job.stage != _PICK and job.i is None):
            unfinished = work.unfinished()
            return work.where(unfinished[0]) if unfinished else "a batch to reach the device"
        where = job.work.where(job.i or 0)
        return where if job.stage == _PICK else f"{where} to be {_DONE[job.stage]}"

    def _overdue(self, job: _Job) -> Sa1bError:
        where = job.work.where(job.i or 0) if len(job.work) else "an empty batch"
        took = f"{time.monotonic() - job.began:.0f} s, and the deadline is {self._limit - _LATE:g} s"
        if job.stage != _PICK:
            return StalledError(
                f"{where}: is not {_DONE[job.stage]} after {took}: a thread of the loader hangs, or the "
                "machine is overloaded; raise the deadline, or leave this image out with a view"
            )
        return UnavailableError(
            f"{where}: is not read after {took}: the disk or the server of its mount does not answer; look "
            "at `df` and `dmesg`",
            last_error="no answer",
            counters=job.work.of(job.i or 0).dataset.reader.counters(),
        )


def _one_mask(image_size: int) -> RaggedMasks:
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
