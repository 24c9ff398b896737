"""`sa1b.Loader`: reads a stream with processes and threads, and prefetches batches to the device.

    loader = sa1b.Loader(stream, device="cuda", dense=256)
    for epoch in range(3):
        for batch in loader:
            ...
            save({"stream": loader.state_dict()})

A job is a batch: its number, a slot of memory, and its positions. It goes to the process that has fewest
jobs, or to threads of this process; see sa1b.stream.maker. The caller's thread gives out jobs, takes the
batches in order, and brings each to the device, one batch ahead; see sa1b.stream.device.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch

from sa1b.arguments import BadValue, check_arguments
from sa1b.errors import UsageError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream, closed_at_exit
from sa1b.stream.device import HELD, DeviceStage
from sa1b.stream.maker import Job, Made, Slots, Threads, overdue, waits_for
from sa1b.stream.pending import READ, named
from sa1b.stream.processes import AHEAD, Processes, sent, server
from sa1b.stream.stats import Snapshot
from sa1b.stream.worker_memory import loads
from sa1b.workers import available_cpus

_THREADS = 2  # of each of several processes
_FEW = 4  # processors below which one process is enough
_LATE = 5.0  # seconds after the deadline in which a read ends by itself with its own error
_LOOK = 1.0  # seconds after which a caller who waits looks what the others do
_LOG = logging.getLogger("sa1b")


class Loader:
    """Iterates over the batches of a stream, on `device`.

    Args:
        stream: the stream or mixture to read, from its current position.
        threads: threads of each process that read and decode; by default 2, and with one process one for each
            CPU that this rank may use, see sa1b.workers.available_cpus, and at most 8.
        processes: processes that read and decode; 1: threads of this process do. By default 1 below 4 CPUs of
            this rank, else as many as occupy them with their threads. One process is used, and the line that
            is logged says so, if JPEG files are decoded on the GPU, outside of Linux, and if a transform is
            defined in the program itself: a process does not import `__main__`, so neither a script without
            `if __name__ == "__main__"` nor a notebook is run again.
        prefetch: batches that are in flight or complete while the caller uses another one, at least 1; with
            several processes, at least two for each process.
        device: device of the batches; "cuda" copies from pinned memory on a separate CUDA stream.
        dense: also rasterise the masks on the device at this size, in pixels: `batch.dense`, see `Batch`.
        decode: "cpu", or "gpu": JPEG files are decoded and resized on `device` by torchcodec (`pip install
            'sa1b[gpu]'`). The stream takes the decoder over, and its state records it, because pixels differ
            between decoders. "auto": the decoder of the stream, by default that of the CPU.
        read_only: promise that the caller never writes into `batch.dense`. On a CPU only the parts with masks
            are then cleared before the memory is reused, which takes a fifth of the time at 1024 pixels. If
            the caller writes into it anyway, the values appear in later batches.
        stall_seconds: seconds after which a sample that is not loaded is logged as a warning, with its shard.
        quiet: do not log processes, threads and memory, which the logger "sa1b" has once, at level INFO.

    Raises:
        ValueError: an argument is invalid, or the device is not available; the message names it.
    """

    @check_arguments
    def __init__(
        self,
        stream: BatchStream,
        *,
        threads: int | None = None,
        processes: int | None = None,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        dense: int | None = None,
        decode: Literal["auto", "cpu", "gpu"] = "auto",
        read_only: bool = False,
        stall_seconds: float = 60.0,
        quiet: bool = False,
    ) -> None:
        if not isinstance(stream, BatchStream):
            raise BadValue(f"stream={stream!r} must be a sa1b.Stream or sa1b.Mix: Loader(Stream(root, ...))")
        self.stream, self.device, self.read_only = stream, torch.device(device), read_only
        self.prefetch, self.dense, self._stall_seconds = prefetch, dense, stall_seconds
        self._limit = stream.deadline + _LATE  # seconds without progress
        on_gpu = self.device.type == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise BadValue("device='cuda': torch finds no GPU; pass device='cpu'")
        now, decodes_on_cpu = stream.options.decoder, stream.decoder.device.type == "cpu"
        if not on_gpu and (decode == "gpu" or (decode == "auto" and not decodes_on_cpu)):
            given = "decode='gpu'" if decode == "gpu" else f"decoder={now!r}"
            raise BadValue(f"{given}: decodes into memory of a GPU, not of {self.device}; pass device='cuda'")
        names = {"auto": now, "cpu": "cpu", "gpu": "torchcodec" if decodes_on_cpu else now}
        if decode not in names:
            raise BadValue(f"decode={decode!r} must be one of {', '.join(map(repr, names))}")
        stream.use_decoder(names[decode])
        cpus = available_cpus()
        if processes is None:
            processes = 1 if cpus < _FEW else max(1, cpus // (threads or _THREADS))
        self._sent, alone = (b"", "") if processes == 1 else sent(stream)
        self.processes = 1 if alone else processes
        self.threads = threads or (_THREADS if self.processes > 1 else min(8, cpus))
        self._ahead = max(self.prefetch + 1, AHEAD * self.processes if self.processes > 1 else 0)
        self._stage = DeviceStage(stream, self.device, dense, read_only=read_only, keep=prefetch + 3)
        self._makers: Threads | Processes | None = None
        self._flying = deque[Job]()  # jobs whose batches the caller has not taken
        self._made = dict[int, Made]()  # by number; batches that wait for their turn
        self._slots = self._new_slots()
        if self.processes > 1:
            server()  # it imports for seconds, while the caller builds the model
        if not quiet:
            used = f"one process, because {alone}; " if alone else ""
            used += f"{self.processes} processes of " if self.processes > 1 else ""
            used += f"{self.threads} thread{'' if self.threads == 1 else 's'}"
            _note(f"sa1b.Loader: {used}, {self._memory()}")

    def __repr__(self) -> str:
        dense = "" if self.dense is None else f", masks at {self.dense} pixels"
        processes = "" if self.processes == 1 else f"processes {self.processes}, "
        settings = f"{processes}threads {self.threads}, prefetch {self.prefetch}, {self.device}{dense}"
        return f"Loader({self.stream!r}: {settings})"

    def __iter__(self) -> Generator[Batch, None, None]:
        """Iterate over one epoch, the next one in each iteration; see `Stream` for epochs=None. An iteration
        ends when another one of the same loader begins.
        """
        return closed_at_exit(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        pieces = enumerate(self.stream.plan.micro_batches(self.stream.begin()))
        self._end(int(self._slots.iteration[0]))  # one that was left without an end
        iteration, ends = int(self._slots.iteration[0]), False
        workers = min(available_cpus(), self.processes * self.threads)
        with self._stage.used(self._slots.array, workers), contextlib.ExitStack() as ending:
            if self.processes == 1:
                ending.enter_context(self.stream.used())
                self._makers = Threads(self.stream, self.threads, self._slots, self._stage.side)
            elif not isinstance(self._makers, Processes) or not self._makers.workers:
                self._makers = Processes(self._sent, self.processes, self.threads, self._slots)
            makers = self._makers
            ending.callback(self._end, iteration)
            while True:
                if iteration != self._slots.iteration[0]:
                    text = "another one of the same loader has begun; make a loader for each"
                    raise UsageError(f"iteration {iteration} has ended: {text}")
                while not ends and len(self._flying) < self._ahead and makers.has_room:
                    if (slot := self._free_slot(makers)) is None:
                        break
                    if (following := next(pieces, None)) is None:
                        ends = True
                        break
                    job = Job(following[0], iteration, slot, following[1])
                    self._slots.progress(job)[:] = 0
                    self._flying.append(job)
                    makers.begin(job)
                if not self._flying:
                    if ends:
                        return
                    self._receive(_LOOK)  # all slots are those of jobs of an earlier iteration
                    continue
                job = self._flying[0]
                made = self._wait_for(job)
                for line in made.damage:
                    self.stream.damage_log.damaged(**line)
                if made.error is not None:
                    raise made.error
                with named(job.piece, self.stream.where):
                    batch = (made.ready or self._to_device(made))()
                self._flying.popleft()
                del self._made[job.number], made
                self._receive(0)
                self._begin_next()
                yield self.stream.taken(batch)
                del batch  # its memory may be used for the next one

    def _end(self, iteration: int) -> None:
        """End an iteration that has not ended: its batches are dropped when they arrive."""
        if iteration != self._slots.iteration[0]:
            return
        self._slots.iteration[0] += 1
        self._made.clear()
        self._flying.clear()
        if isinstance(threads := self._makers, Threads):
            self._makers = None
            if not threads.close():  # one that hangs may still write into the slots
                self._slots = self._new_slots()

    def _new_slots(self) -> Slots:
        options, elsewhere = self.stream.options, self.stream.decoder.device.type != "cpu"
        images = (self.stream.plan.micro_batch, options.image_size, options.image_size, 3)
        shared, count = self.processes > 1, self._ahead + HELD
        return Slots(count, images, options.masks, shared=shared, elsewhere=elsewhere)

    def _free_slot(self, makers: Threads | Processes) -> int | None:
        """A slot that nothing uses. Waits for a copy to a GPU if there is no other."""
        while True:
            used = self._stage.slots_in_use() | makers.slots
            used |= {made.job.slot for made in self._made.values() if made.batch is not None}
            free = next((slot for slot in range(len(self._slots)) if slot not in used), None)
            if free is not None or not self._stage.wait_for_copy():
                return free

    def _begin_next(self) -> None:
        """Begin to copy and to rasterise the next batch, if it is made, while the caller works."""
        made = self._made.get(self._flying[0].number) if self._flying else None
        if made is not None and made.error is None:
            try:
                with named(made.job.piece, self.stream.where):
                    made.ready = self._to_device(made, ahead=True)
            except Exception as error:
                made.error = error  # raised in its turn

    def _wait_for(self, job: Job) -> Made:
        """The batch of a job. Logs a sample that is late; an error if nothing is made until the deadline."""
        began, waiting = time.perf_counter(), self._waiting()
        progress, before, limit = self._slots.progress(job), -1, self._limit
        since = said = time.monotonic()  # of the last progress, of the last line
        while job.number not in self._made:
            self._receive(min(_LOOK, self._stall_seconds, limit))
            now, done = time.monotonic(), int(progress.sum())
            if done != before:
                before, since, said = done, now, now
            elif job.number in self._made:
                break
            elif now - since >= limit:
                raise overdue(self.stream, waits_for(self.stream, job.piece, progress), now - since)
            elif now - said >= self._stall_seconds:
                said = now
                late = f"{waits_for(self.stream, job.piece, progress)} for over {self._stall_seconds:g} s"
                _LOG.warning(f"sa1b.Loader: waiting for {late}")
        self.stream.stats.requested(waiting, time.perf_counter() - began)
        return self._made[job.number]

    def _receive(self, seconds: float) -> None:
        """Take what was made, waiting at most `seconds` for the first."""
        assert self._makers is not None
        for made in self._makers.receive(seconds):
            self.stream.stats.count(made.busy)
            if made.job.iteration == self._slots.iteration[0]:
                self._made[made.job.number] = made

    def _to_device(self, made: Made, *, ahead: bool = False) -> Callable[[], Batch]:
        """Begin the way of a batch to the device; the result waits for its end."""
        job, batch = made.job, made.batch
        assert batch is not None
        memory = self._slots.memory(job.slot)
        whole = torch.from_numpy(memory)  # the tensors are its views: views by numpy would not keep `memory`
        if isinstance(batch, bytes):
            batch = loads(batch, memory)
        elif self.device.type == "cpu":
            images = whole[: batch.images.nbytes].view(len(batch), *self._slots.images[1:])
            batch = replace(batch, images=images.permute(0, 3, 1, 2))
        if self.device.type == "cpu":
            batch = replace(batch, buffer=None)
        made.batch = None
        return self._stage.begin(batch, memory, job.slot, ahead=ahead)

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch. Raises TypeError for an endless stream (epochs=None)."""
        return len(self.stream)

    @property
    def steps_per_epoch(self) -> int:
        """See `Stream.steps_per_epoch`."""
        return self.stream.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of an epoch; see `Stream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that the caller took; prefetched batches do not count."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; see `Stream.load_state_dict`."""
        self.stream.load_state_dict(state)

    def stats(self) -> Snapshot:
        """Statistics of each stage since the stream was created: a dict that prints as a table.

        See `sa1b.stream.stats.PipelineStats.snapshot` for its keys and units.
        """
        return self.stream.stats.snapshot()

    def reading(self) -> str | None:
        """The sample that the next incomplete batch waits for, with shard and offset; None if none.

        Any thread may call this while another one iterates.
        """
        for job in tuple(self._flying):
            if job.number not in self._made and job.piece.stop > job.piece.start:
                return waits_for(self.stream, job.piece, self._slots.progress(job))
        return None

    def _waiting(self) -> dict[str, int]:
        """The samples in flight that wait to be read and to be decoded, and the complete batches."""
        progress = [self._slots.progress(job) for job in self._flying if job.number not in self._made]
        unread = sum(int((samples < READ).sum()) for samples in progress)
        read = sum(int((samples == READ).sum()) for samples in progress)
        return {"read": unread, "decode": read, "device": len(self._made)}

    def _memory(self) -> str:
        options, images, on_cpu = self.stream.options, self.stream.plan.micro_batch, self.device.type == "cpu"
        # While the caller asks for the next batch, it holds one, and the others are in flight. On a CPU, only
        # the next one of these has dense masks.
        whole, place = self._ahead + 1, "of memory" if on_cpu else "on the device"
        size = f"{whole * images * options.image_size**2 * 3 / 1e6:,.0f} MB {place}"
        text = f"{whole} batches of up to {images} images, {size} for images"
        if self.dense:
            masks = (2 if on_cpu else whole) * images * options.masks * self.dense**2
            text += f" and {masks / 1e6:,.0f} MB for masks"
        if self.stream.decoder.device.type != "cpu":
            return f"{text}, decoded there by {options.decoder}"
        return text if on_cpu else f"{text}, {self._slots.array.nbytes / 1e6:,.0f} MB of pinned memory"


@cache
def _note(text: str) -> None:
    """Log a line, visible by default: on stderr where the program has not set up logging."""
    if _LOG.hasHandlers() or _LOG.level or logging.lastResort is None:
        _LOG.info(text)
    else:
        logging.lastResort.handle(
            _LOG.makeRecord(_LOG.name, logging.INFO, __file__, 0, text, args=(), exc_info=None)
        )
