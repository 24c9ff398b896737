"""Which positions a rank reads together, step by step."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from sa1b.stream.order import Order, Sequential, micro_batch_count, micro_batches, rank_slice


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Positions [start, stop) that one rank reads together, and where the stream stands behind them."""

    start: int
    stop: int
    position: int


@dataclass(slots=True)
class Plan:
    """Which positions a rank reads, step by step.

    Attributes:
        order: shuffled and endless, or sequential and finite.
        global_batch: samples of a step over all ranks.
        micro_batch: at most so many samples of a rank at a time.
        rank, world_size: of this process.
        count: micro-batches of a step, as many on every rank.
    """

    order: Order | Sequential
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = micro_batch_count(
            self.global_batch, self.world_size, self.micro_batch, block_size=self._block_size
        )

    @property
    def _block_size(self) -> int:
        return self.order.block_size if isinstance(self.order, Order) else 1

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from a position on, which begins a step."""
        while isinstance(self.order, Order) or position < self.order.count:
            start, stop = rank_slice(
                position, self.global_batch, self.rank, self.world_size, block_size=self._block_size
            )
            pieces = micro_batches(start, stop, self.micro_batch, self.count)
            after = position + self.global_batch
            for i, (first, last) in enumerate(pieces):
                yield MicroBatch(first, last, after if i == len(pieces) - 1 else position)
            position = after


def process_rank() -> tuple[int, int]:
    """Rank and world size: from torch.distributed if it is initialised, else from torchrun's variables, else
    one process.

    Raises:
        ValueError: RANK and WORLD_SIZE do not fit each other.
    """
    # torch.distributed cannot be initialised if nobody imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world_size} do not fit; torchrun sets both")
    return rank, world_size
