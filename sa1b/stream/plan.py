"""Which positions a rank reads together, step by step."""

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
        rank, world: of this process.
        count: micro-batches of a step, as many on every rank.
    """

    order: Order | Sequential
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = micro_batch_count(self.global_batch, self.world, self.micro_batch, run=self._run)

    @property
    def _run(self) -> int:
        return self.order.run if isinstance(self.order, Order) else 1

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from a position on, which begins a step."""
        while isinstance(self.order, Order) or position < self.order.count:
            start, stop = rank_slice(position, self.global_batch, self.rank, self.world, run=self._run)
            pieces = micro_batches(start, stop, self.micro_batch, self.count)
            after = position + self.global_batch
            for i, (first, last) in enumerate(pieces):
                yield MicroBatch(first, last, after if i == len(pieces) - 1 else position)
            position = after
