"""The batches of a `sa1b.Loader` as they are made: by threads of its process, or by processes of its own.

    loader                                                process, or the loader's own threads
    Job(number, slot, positions)   ------ pipe ------>    reads, chooses, decodes into the slot, collates
    Made(batch, damage, counters)  <----- pipe -------    its tensors are places in the slot

A process works on whole batches, and its threads each take a share of a batch; see sa1b.stream.processes.
A slot is memory that all processes share. It is an anonymous file, so a killed run leaves nothing behind, and
the size of /dev/shm is no limit.
"""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import DupFd
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.storage.errors import UnavailableError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.device import SideStream
from sa1b.stream.pending import DECODED, READ, PendingBatch
from sa1b.stream.plan import MicroBatch
from sa1b.stream.stats import Busy
from sa1b.stream.worker_memory import mapped

_PAGE = 4096
_MASK_BYTES = 4096  # of a slot for each mask; the runs of a mask take 600 bytes in the mean
_MASKS = 256  # of an image, at most, for which a slot has room; more are sent as bytes
_CLOSING = 5.0  # seconds that the end of an iteration waits for threads


class StalledError(Sa1bError):
    """A thread of a loader hangs; the message names the sample and the stage."""


class Slots:
    """Memory for `count` batches: the images, of this shape unless they are decoded `elsewhere`, the other
    tensors, with up to so many `masks` of an image, and the progress of the samples. Other processes map
    `shared` memory. Jobs of other iterations than `iteration[0]` are dropped.
    """

    def __init__(
        self,
        count: int,
        images: tuple[int, ...],
        masks: int,
        *,
        shared: bool = False,
        elsewhere: bool = False,
        file: Any = None,
    ) -> None:
        self.images, self._arguments = images, (count, images, masks)
        # Bytes of the images, and of a slot: the other tensors are behind the images.
        pages, self.pixels = -(-(8 + count * images[0]) // _PAGE), 0
        if not elsewhere:
            self.pixels = -(-int(np.prod(images)) // _PAGE) * _PAGE
        size = self.pixels + images[0] * (min(masks, _MASKS) * _MASK_BYTES + _PAGE)
        head, length = pages * _PAGE, pages * _PAGE + count * size
        if not shared:
            self.array = np.empty(length + _PAGE, np.uint8)
            self.array = self.array[-self.array.ctypes.data % _PAGE :][:length]
        else:
            self._file = os.memfd_create("sa1b-loader", os.MFD_CLOEXEC) if file is None else file.detach()
            weakref.finalize(self, os.close, self._file)  # the memory stays while an array refers to it
            self.array = mapped(self._file, length)
        self.iteration = self.array[:8].view(np.int64)
        if file is None:
            self.iteration[0] = 0
        self._progress = self.array[8 : 8 + count * images[0]].reshape(count, -1)
        self._slots = self.array[head:].reshape(count, -1)

    def __len__(self) -> int:
        return len(self._slots)

    def __reduce__(self) -> Any:
        return partial(Slots, shared=True, file=DupFd(self._file)), self._arguments

    def memory(self, slot: int) -> npt.NDArray[np.uint8]:
        """A slot, as a new array: it is in use while a tensor or an array refers to it."""
        return self._slots[slot, :]

    def progress(self, job: "Job") -> npt.NDArray[np.uint8]:
        """The progress of each sample of a job, see `PendingBatch`."""
        return self._progress[job.slot, : job.piece.stop - job.piece.start]


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to make, number `number` of an iteration."""

    number: int
    iteration: int
    slot: int
    piece: MicroBatch


def waits_for(stream: BatchStream, piece: MicroBatch, progress: npt.NDArray[np.uint8]) -> str:
    """What a batch that is not made waits for: a sample, and its stage after it was read."""
    for stage, text in ((READ, ""), (DECODED, " to be decoded")):
        if len(late := np.flatnonzero(progress < stage)):
            return stream.where(piece.start + int(late[0])) + text
    return f"a batch to be collated {piece.span(stream.where)}"


def overdue(stream: BatchStream, waits_for: str, seconds: float) -> Sa1bError:
    """The error for a batch that has made no progress for `seconds`, longer than a read may take."""
    what, _, stage = waits_for.partition(" to be ")
    took = f"{seconds:.0f} s, and the deadline is {stream.deadline:g} s"
    if stage:
        return StalledError(
            f"{what}: is not {stage} after {took}: a thread of the loader hangs, or the machine is "
            "overloaded; raise the deadline, or leave this image out with a view"
        )
    return UnavailableError(
        f"{what}: is not read after {took}: the disk or the server of its mount does not answer; look at "
        "`df` and `dmesg`",
        last_error="no answer",
    )


@dataclass(slots=True)
class Made:
    """The batch of a job, or its error, or neither if its iteration has ended."""

    job: Job
    # From a process: its pickle. None: there is none, or it is on its way to the device.
    batch: Batch | bytes | None = None
    error: BaseException | None = None
    damage: list[dict[str, Any]] = field(default_factory=list)
    busy: Busy = field(default_factory=Busy)
    ready: Callable[[], Batch] | None = None  # waits until the batch is on the device


Deliver = Callable[[Made, Tensor], None]


class Maker:
    """Makes batches with threads, and delivers each with its slot. `packs`: all tensors go into the slot."""

    def __init__(
        self, stream: BatchStream, threads: int, slots: Slots, deliver: Deliver, *, packs: bool
    ) -> None:
        self._stream, self._threads, self._slots = stream, threads, slots
        self._deliver, self._packs = deliver, packs
        self._side: SideStream | None = None  # of a decoder on a GPU
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sa1b-loader")
        self._lock, self._working = threading.Lock(), dict[int, PendingBatch]()  # by slot

    def begin(self, job: Job) -> None:
        """Start to read a batch. It is delivered when it is made, as every error is."""
        memory, made = torch.from_numpy(self._slots.memory(job.slot)), Made(job)
        try:
            pending = self._stream.submit(job.piece)
            made.damage, made.busy = pending.damage, pending.busy
            shape = (len(pending), *self._slots.images[1:])
            if self._side is None:
                pending.images = memory[: int(np.prod(shape))].view(shape)
            else:
                pending.images = self._side.empty(shape)
            pending.progress = self._slots.progress(job)
            share = -(-len(pending) // self._threads) or 1
            starts = range(0, len(pending), share) or range(1)
            self._working[job.slot], pending.left = pending, len(starts)
            for start in starts:
                stop = min(start + share, len(pending))
                self._pool.submit(self._make, made, pending, memory, start, stop)
        except BaseException as error:
            made.error = error
            self._deliver(made, memory)

    def close(self) -> bool:
        """End the work; return False if a thread hangs."""
        for pending in list(self._working.values()):
            pending.cancel()
        end = partial(self._pool.shutdown, wait=True, cancel_futures=True)
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(_CLOSING)
        return not ending.is_alive()

    def _make(self, made: Made, pending: PendingBatch, memory: Tensor, start: int, stop: int) -> None:
        """Make a share of a batch; the thread that is last makes the rest."""
        busy = Busy()
        try:
            if self._is_wanted(made.job):
                if self._side is not None:
                    self._side.begin_thread()
                pending.pick(start, stop, busy)
                if not self._stream.decoder.batched:
                    pending.decode(start, stop, busy)
        except BaseException as error:
            pending.errors[start] = error
        with self._lock:
            made.busy.update(busy)
            pending.left -= 1
            if pending.left:
                return
            del self._working[made.job.slot]
        try:
            if pending.errors:
                made.error = pending.errors[min(pending.errors)]
            elif self._is_wanted(made.job):
                if self._stream.decoder.batched:
                    with nullcontext() if self._side is None else self._side.current():
                        pending.decode(0, len(pending), made.busy)
                made.batch = pending.collate()
                if self._packs:
                    room = memory[self._slots.pixels :]
                    made.batch = made.batch.pack(
                        lambda n: room if n <= len(room) else torch.empty(n, dtype=torch.uint8)
                    )
        except BaseException as error:
            made.batch, made.error = None, error
        if made.batch is None:
            pending.cancel()
        self._deliver(made, memory)

    def _is_wanted(self, job: Job) -> bool:
        return bool(job.iteration == self._slots.iteration[0])


class Threads(Maker):
    """Makes the batches of one iteration with threads of the caller's process."""

    has_room = True

    def __init__(self, stream: BatchStream, threads: int, slots: Slots, side: SideStream | None) -> None:
        made = self._made = SimpleQueue[Made]()
        self.slots = set[int]()  # of jobs, into which threads may write
        super().__init__(stream, threads, slots, lambda one, _: made.put(one), packs=side is not None)
        self._side = None if stream.decoder.device.type == "cpu" else side

    def begin(self, job: Job) -> None:
        self.slots.add(job.slot)
        super().begin(job)

    def receive(self, seconds: float) -> list[Made]:
        """What has been made since, waiting at most `seconds` for the first."""
        found = list[Made]()
        with suppress(Empty):
            found.append(self._made.get(seconds > 0, seconds or None))
            while True:
                found.append(self._made.get_nowait())
        self.slots.difference_update(made.job.slot for made in found)
        return found
