"""What `sa1b.Stream` and `sa1b.Mix` have in common: a torch dataset whose only state is a position.

Every worker process iterates over its own copy of the stream, so the position of the next iteration is in an
anonymous file that all share. The first worker of an iteration advances it to the start of the next one; the
others join the iteration at its start. With 100 images and two workers:

    position 0      worker 0 begins an iteration at 0: the next one begins at 100
    position 100    worker 1 joins it at 0, because it has the same iterator as worker 0
    position 100    worker 1 begins the second iteration at 100
"""

import atexit
import fcntl
import json
import os
import sys
import tempfile
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from sa1b.arguments import whole_number
from sa1b.errors import UsageError
from sa1b.limit import ForkLock
from sa1b.stream.batch import Batch
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.decoders import Decoder, decoder
from sa1b.stream.pending import PendingBatch, SampleSource
from sa1b.stream.plan import MAX_POSITION, MicroBatch, Plan, ResumeError, checked_position
from sa1b.stream.sample import SampleOptions
from sa1b.stream.stats import PipelineStats
from sa1b.stream.worker_memory import prepare_worker

_PREFETCH = 1  # micro-batches in flight while one is decoded
_RUNNING: "weakref.WeakSet[Generator[Any]]" = weakref.WeakSet()  # iterations of this process
_BYTES = 4096  # of the state, which a write of one page replaces as a whole
_REMEMBERED = 8  # largest number of iterations that worker processes may start at the same time


class Iterations:
    """What all processes that read a stream know of its iterations."""

    # In JSON: `position` of the next iteration; `used`, the one after the last used batch, None if worker
    # processes have read since; and `begun`, the last iterations of workers: [seed of the iterator, position,
    # workers], where bit i of `workers` says that worker i has begun.

    def __init__(self, position: int = 0, inherited: Any = None) -> None:
        self._lock = ForkLock()
        if inherited is not None:
            self._file = inherited.detach()
        elif sys.platform == "linux":  # in memory, so that no temporary folder is needed
            self._file = os.memfd_create("sa1b-iterations")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file).atexit = False
        if inherited is None:
            self._write({"position": position, "used": position, "begun": []})

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:  # for a worker
            return Iterations, (0, DupFd(self._file))
        with self.state() as state:  # a copy
            return Iterations, (state["position"],)

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """The state, which the caller may change, and no other thread or process meanwhile."""
        # The lock of the file is of the process, not of a thread; the kernel releases it if it is killed.
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                state = json.loads(os.pread(self._file, _BYTES, 0))
                yield state
                self._write(state)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _write(self, state: dict[str, Any]) -> None:
        os.pwrite(self._file, json.dumps(state).encode().ljust(_BYTES), 0)


class BatchStream(IterableDataset[Batch]):
    """Micro-batches of one rank, in the order of a formula; see `sa1b.Stream` and `sa1b.Mix`."""

    plan: Plan
    iterations: Iterations
    stats: PipelineStats
    damage_log: DamageLog
    options: SampleOptions  # of a mixture: those of its first source, with the most masks of all
    decoder: Decoder

    @abstractmethod
    def sources(self) -> Mapping[Any, SampleSource]:
        """Where the samples come from: the streams of a mixture by name, else this one by None."""

    def use_decoder(self, name: str) -> None:
        """Decode with another decoder of sa1b.stream.decoders, which options and state then name."""
        if name != self.options.decoder:
            self.decoder, self.options = decoder(name), replace(self.options, decoder=name)

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The state to resume from without its position: what decides the sequence and the samples."""

    def state_dict(self, batch: Batch | None = None) -> dict[str, Any]:
        """The state to resume from.

        Args:
            batch: the last batch that was used: training resumes after it. None: the last one that this
                process has taken; UsageError if worker processes of a DataLoader have read.
        """
        if batch is not None:
            return {"position": batch.position, **self.identity()}
        with self.iterations.state() as state:
            # In a worker, for StatefulDataLoader, that of the next iteration.
            position = state["used" if get_worker_info() is None else "position"]
        if position is None:
            raise UsageError("state_dict(): DataLoader workers read this stream; call state_dict(batch)")
        return {"position": position, **self.identity()}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, at any world size, micro-batch size or number of workers."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.plan.rank

    @property
    def world_size(self) -> int:
        """Processes that share the steps."""
        return self.plan.world_size

    @property
    def deadline(self) -> float:
        """Seconds that one read may take over all its attempts."""
        return max(source.dataset.reader.retry_policy.deadline for source in self.sources().values())

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch. Raises TypeError for an endless stream (epochs=None)."""
        return len(self.plan)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch; for an endless stream, the number that covers an epoch."""
        return self.plan.steps_per_epoch

    @property
    def position(self) -> int:
        """Position at which the next iteration begins, in samples over all epochs.

        Beginning an iteration advances it to the next epoch. `state_dict(batch)` is the state within an
        iteration.
        """
        with self.iterations.state() as state:
            return int(state["position"])

    @position.setter
    def position(self, position: int) -> None:
        position = checked_position(position)
        with self.iterations.state() as state:
            state |= {"position": position, "used": position}

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of an epoch. The first epoch is 0.

        Raises:
            ValueError: the epoch is not a whole number, negative, or beyond the last position.
        """
        epoch, count = whole_number("epoch", epoch), self.plan.order.count
        self.position = whole_number("epoch", epoch, most=MAX_POSITION // count) * count

    def begin(self) -> int:
        """Begin an iteration and return its position. The next one is the next epoch; an endless stream
        continues after the last batch passed to `taken`: UsageError if a DataLoader with workers read it.
        """
        # An endless plan does not change the position: the caller sets it when it takes batches.
        worker, plan = get_worker_info(), self.plan
        with self.iterations.state() as state:
            # An iterator is identified by `seed - id`, the random number of the DataLoader for its workers.
            # Persistent workers keep it, and so do new ones if torch's generator is reset. A worker that has
            # joined an iteration already then begins the next one.
            iterator, bit = (worker.seed - worker.id, 1 << worker.id) if worker else (None, 0)
            joined = [one for one in state["begun"] if one[0] == iterator and not one[2] & bit]
            if joined:
                position = joined[-1][1]
                joined[-1][2] |= bit
            else:
                position = None if plan.endless and state["used"] is None else state["position"]
                state["used"] = None if worker else position
                if worker:
                    state["begun"] = [*state["begun"], [iterator, position, bit]][-_REMEMBERED:]
                if not plan.endless:
                    state["position"] = plan.epoch_end(state["position"])
        if position is None:
            raise UsageError(
                "an endless stream (epochs=None): cannot be iterated again after a DataLoader with workers; "
                "call load_state_dict with the state after the last batch, set_epoch, or leave epochs at 1"
            )
        return int(position)

    def taken(self, batch: Batch) -> Batch:
        """Record that this process has used `batch`; an endless stream continues after it."""
        if get_worker_info() is None:
            with self.iterations.state() as state:
                state["used"] = batch.position
                if self.plan.endless:
                    state["position"] = batch.position
        return batch

    def __iter__(self) -> "StreamIterator":
        if get_worker_info() is not None and self.decoder.device.type != "cpu":
            raise UsageError(
                f"decoder={self.options.decoder!r}: decodes on a GPU, which worker processes of a "
                "DataLoader cannot share; read with sa1b.Loader(stream, device='cuda')"
            )
        return StreamIterator(self)

    def read(self, pieces: Iterable[MicroBatch]) -> Generator[Batch]:
        """Read micro-batches, the next one while one is decoded."""
        return closed_at_exit(self._read(pieces))

    def _read(self, pieces: Iterable[MicroBatch]) -> Generator[Batch]:
        submitted = map(self.submit, pieces)
        with self.used():
            in_flight = deque[PendingBatch]()
            try:
                in_flight.extend(islice(submitted, _PREFETCH))
                while in_flight:
                    in_flight.extend(islice(submitted, 1))
                    yield self.taken(self._finished(in_flight.popleft()))
            finally:
                for pending in in_flight:
                    pending.cancel()

    def _finished(self, pending: PendingBatch) -> Batch:
        try:
            return pending.finish()
        finally:
            self.stats.count(pending.busy)
            for line in pending.damage:
                self.damage_log.damaged(**line)

    def submit(self, piece: MicroBatch) -> PendingBatch:
        """Start reading all samples of a micro-batch concurrently."""
        return PendingBatch(self.sources(), self.plan.order, piece)

    def where(self, position: int) -> str:
        """Image, shard and offset of the sample at a position, for messages; not of a substitute."""
        (which,), local, _ = self.plan.order.locate(np.array([position]))
        name, source = list(self.sources().items())[int(which)]
        return source.place(source.rows(local)[0], name)

    @contextmanager
    def used(self) -> Generator[None]:
        """A context in which samples are read: see `sa1b.storage.reader.Reader.used`."""
        with ExitStack() as ending:
            for source in self.sources().values():
                ending.enter_context(source.dataset.reader.used())
            yield

    def close(self) -> None:
        """Close files and connections of this process; the next read opens them again."""
        for source in self.sources().values():
            source.dataset.reader.close()


class StreamIterator(Iterator[Batch]):
    """One iteration over a stream in one process, which begins with its first batch. Its state, the start and
    the number of used batches, is what torchdata's StatefulDataLoader saves.
    """

    def __init__(self, stream: BatchStream) -> None:
        self._stream, self._plan, self._read = stream, stream.plan, stream.read
        info = get_worker_info()
        self._worker, self._workers = (info.id, info.num_workers) if info else (0, 1)
        # Batch i of a rank comes from worker i mod `workers`, and `count` batches are a step of the rank.
        # Where each of them begins depends on `micro_batch`.
        sizes = ("rank", "world_size", "global_batch", "micro_batch", "count")
        self._identity = {name: getattr(self._plan, name) for name in sizes}
        self._identity |= {"worker": self._worker, "workers": self._workers}
        self._used = 0
        self._batches: Generator[Batch] | None = None
        if info:
            prepare_worker()

    @cached_property
    def _begun(self) -> int:
        return self._stream.begin()

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read(())  # a DataLoader asks for more also if the iteration cannot begin
            self._batches = self._read(self._pieces())
        batch = next(self._batches)
        self._used += 1
        return batch

    def close(self) -> None:
        """End the iteration before its last batch: cancel its reads."""
        self._batches = self._batches or self._read(())
        self._batches.close()

    def _pieces(self) -> Iterable[MicroBatch]:
        start, rest = self._next_step()
        return () if rest is None else islice(self._plan.micro_batches(start), rest, None, self._workers)

    def _next_step(self) -> tuple[int, int | None]:
        """The step of the next batch, and the batch's number in it; None: the iteration has ended."""
        steps, rest = divmod(self._worker + self._used * self._workers, self._plan.count)
        start = self._begun + steps * self._plan.global_batch
        if self._plan.endless or start < (end := self._plan.epoch_end(self._begun)):
            return start, rest
        return end, None

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch; `following`: position at which the next iteration begins."""
        state = {**self._identity, "begun": self._begun, "used": self._used}
        return {**state, "following": self._stream.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an iteration before its first batch; ResumeError if ranks, workers or sizes differ."""
        now = self._identity.items()
        if changes := [f"{key} {state.get(key)}, now {one}" for key, one in now if state.get(key) != one]:
            raise ResumeError(
                f"load_state_dict(): {', '.join(changes)}; resume with the same ranks, workers and batch "
                "sizes, or save stream.state_dict(batch) or the state of a sa1b.Loader, which fit others"
            )
        self._begun, self._used = state["begun"], state["used"]
        used = None if get_worker_info() else self._next_step()[0]
        with self._stream.iterations.state() as shared:
            shared |= {"position": state["following"], "used": used}


def closed_at_exit(batches: Generator[Batch]) -> Generator[Batch]:
    """The generator, which is closed when the process exits, while the modules that it needs exist."""
    _RUNNING.add(batches)
    return batches


@atexit.register
def _close_all() -> None:
    for batches in list(_RUNNING):
        with suppress(ValueError):  # another thread is inside of it
            batches.close()
