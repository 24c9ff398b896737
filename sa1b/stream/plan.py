"""The positions that a rank reads in each step, as micro-batches."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sa1b.arguments import whole_number
from sa1b.stream.order import (
    Order,
    Sequential,
    check_global_batch,
    micro_batch_count,
    micro_batch_size,
    micro_batches,
    rank_slice,
)

MAX_POSITION = 1 << 62  # samples over all epochs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Positions [start, stop) that one rank reads together, and the position to resume at after them."""

    start: int
    stop: int
    position: int


@dataclass(slots=True)
class Plan:
    """The micro-batches of a rank, step by step.

    Attributes:
        order: order of the samples.
        global_batch: samples of a step over all ranks.
        micro_batch: largest number of samples that a rank reads at a time; with shares, for the largest one.
        rank, world_size: rank of this process, and number of processes.
        shares: for each rank, its share of a step; None: all ranks have the same.
        count: micro-batches of a full step, the same number on every rank.

    Raises:
        ValueError: the sizes do not fit together.
    """

    order: Order | Sequential
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int
    shares: Sequence[int] | None = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch, self.world_size, self.block_size, self.shares)
        self._slice(0, self.global_batch)
        self.count = self._count(self.global_batch)

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch, the same number on every rank.

        Raises:
            TypeError: the order is endless.
        """
        if self._endless:
            raise TypeError("len(stream): an endless stream (epochs=None) has no length; use steps_per_epoch")
        before = (self.steps_per_epoch - 1) * self.global_batch
        return (self.steps_per_epoch - 1) * self.count + self._count(self._step_size(before))

    @property
    def steps_per_epoch(self) -> int:
        """Global batches that cover an epoch. An endless order may begin and end an epoch within a step."""
        return -(-self.order.count // self.global_batch)

    def epoch_end(self, position: int) -> int:
        """End of the epoch of a position. The border of two epochs belongs to the second epoch."""
        return (position // self.order.count + 1) * self.order.count

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from the start of a step to the end of the epoch, if there is an end.

        Raises:
            ValueError: the position is negative or cuts a block.
        """
        if isinstance(self.order, Sequential):
            position %= self.order.count  # every epoch repeats the first one
        else:
            self.order.check_step(position)
        end = self.epoch_end(position)
        while self._endless or position < end:
            size = self._step_size(position)
            start, stop = self._slice(position, size)
            pieces = micro_batches(
                start, stop, micro_batch_size(self.micro_batch, self.rank, self.shares), self._count(size)
            )
            after = position + size if self._endless else min(position + size, end)
            for i, (first, last) in enumerate(pieces):
                yield MicroBatch(first, last, after if i == len(pieces) - 1 else position)
            position = after

    @property
    def _endless(self) -> bool:
        return isinstance(self.order, Order) and self.order.endless

    @property
    def block_size(self) -> int:
        """Length of a block in samples; 1 for a sequential order."""
        return self.order.block_size if isinstance(self.order, Order) else 1

    def _step_size(self, position: int) -> int:
        """Samples of the step that begins at a position: fewer at the end of an epoch of training."""
        if self._endless or isinstance(self.order, Sequential):
            return self.global_batch
        return min(self.global_batch, self.epoch_end(position) - position)

    def _count(self, samples: int) -> int:
        """Number of micro-batches of a step with this number of samples."""
        return micro_batch_count(
            samples, self.world_size, self.micro_batch, block_size=self.block_size, shares=self.shares
        )

    def _slice(self, position: int, samples: int) -> tuple[int, int]:
        """This rank's positions in a step."""
        return rank_slice(
            position, samples, self.rank, self.world_size, block_size=self.block_size, shares=self.shares
        )


def checked_position(position: object, name: str = "position") -> int:
    """A position, which leaves room for an epoch in the 63 bits of a position.

    Raises:
        ValueError: not a whole number from 0 to MAX_POSITION.
    """
    return whole_number(name, position, most=MAX_POSITION)


def largest_share(samples: int, world_size: int, shares: Sequence[int] | None) -> int:
    """Samples of the largest slice of a step, rounded up."""
    if not shares:
        return -(-samples // world_size)
    return -(-samples * max(shares) // sum(shares))


def process_rank() -> tuple[int, int]:
    """Rank and world size of this process.

    They come from torch.distributed if it is initialised, else from torchrun's environment variables. Without
    either, the process is rank 0 of 1.

    Raises:
        ValueError: a variable is no number, or RANK is negative or not below WORLD_SIZE.
    """
    # If torch.distributed was never imported, it is not initialised.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | os.environ
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not numbers[name].removeprefix("-").isdecimal():
            raise ValueError(f"{name}={numbers[name]}: must be a whole number; torchrun sets it")
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank}: must be from 0 to below WORLD_SIZE={world_size}; torchrun sets both")
    return rank, world_size
