"""What `sa1b.Stream` and `sa1b.Mix` have in common: a torch dataset whose only state is a position."""

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from sa1b.arguments import whole_number
from sa1b.errors import UsageError
from sa1b.stream.batch import Batch
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.decoders import Decoder, decoder
from sa1b.stream.iterations import Iterations, StreamIterator, closed_at_exit
from sa1b.stream.pending import PendingBatch, SampleSource, where
from sa1b.stream.plan import MAX_POSITION, MicroBatch, Plan, checked_position
from sa1b.stream.sample import SampleOptions
from sa1b.stream.stats import PipelineStats

_PREFETCH = 1  # micro-batches in flight while one is decoded


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
        position = self.iterations.used if batch is None else batch.position
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
        return self.iterations.position

    @position.setter
    def position(self, position: int) -> None:
        self.iterations.resume(checked_position(position), position)

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
        return self.iterations.begin(self.plan)

    def taken(self, batch: Batch) -> Batch:
        """Record that this process has used `batch`; an endless stream continues after it."""
        if get_worker_info() is None:
            self.iterations.resume(batch.position if self.plan.endless else None, batch.position)
        return batch

    def __iter__(self) -> StreamIterator:
        if get_worker_info() is not None and self.decoder.device.type != "cpu":
            raise UsageError(
                f"decoder={self.options.decoder!r}: decodes on a GPU, which worker processes of a "
                "DataLoader cannot share; read with sa1b.Loader(stream, device='cuda')"
            )
        return StreamIterator(self.plan, self.iterations, self.read)

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
        return where(name, source, source.rows(local)[0])

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """A context in which samples are read: see `sa1b.storage.reader.Reader.used`."""
        with contextlib.ExitStack() as ending:
            for source in self.sources().values():
                ending.enter_context(source.dataset.reader.used())
            yield

    def close(self) -> None:
        """Close files and connections of this process; the next read opens them again."""
        for source in self.sources().values():
            source.dataset.reader.close()
