"""The order of training as a formula: the sample at each position, and the positions of each rank.

Positions count the samples of all epochs, from 0 on; epoch e of N samples is [e*N, (e+1)*N). In each epoch
a keyed bijection maps the positions to the rows 0 to N - 1: a full shuffle, another one each epoch, without
a table. The only state of a run is the position p at which its next step begins.

A step takes the global batch [p, p + G). Rank r of W takes the slice [p + r*G//W, p + (r+1)*G//W) of it. The
lengths of slices differ by at most one sample. G and W may change at any step.

All ranks must run the same number of micro-batches; otherwise collectives wait forever. The number depends
only on G, W and the micro-batch size m: the largest slice has ceil(G / W) samples, so there are
ceil(ceil(G / W) / m) micro-batches. A slice is cut into pieces of m from its start, so the last ones may be
short or empty. A rank runs every collective for an empty micro-batch too. With p = 0, G = 8, W = 3 and m = 1:

    rank 0 [0, 1) [1, 2) [2, 2)    rank 1 [2, 3) [3, 4) [4, 5)    rank 2 [5, 6) [6, 7) [7, 8)

If an iteration ends with the epoch, the last step takes only the remaining N mod G samples and divides them
in the same way: some ranks may have no sample. A step of an endless order takes [p, p + G) across the border
of two epochs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, isqrt, lcm
from typing import ClassVar, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.hashing import Purpose, Words, random_word
from sa1b.stream import order_kernels
from sa1b.stream.order_kernels import ROUNDS, EpochSizes

MAX_PERIOD = 1 << 20  # positions; the table of a period takes 12 bytes each
Int64 = npt.NDArray[np.int64]
# For N positions, three arrays: number of the source, int64; position in this source, int64; and whether the
# sample is valid (else padding), bool.
Located = tuple[Int64, Int64, npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Order:
    """The shuffled order of a view, for training.

    With `block_size` L > 1, each block of L positions contains L consecutive rows (cyclically), so that one
    read can fetch them. Row numbers must then count samples in the order of shard and offset, as in
    `View.by_location`. A block stays in one rank's slice and one read if steps begin at its border and global
    batches are multiples of L; `check_step` and `check_global_batch` verify this. Each epoch cuts the rows
    into blocks at a different row. Every row occurs once per epoch, also if L does not divide N:

    - with `endless`, blocks begin at the multiples of L, counted over all epochs. The last short piece of an
      epoch and the first of the next one share a block's positions, so that all later blocks stay aligned.
    - without `endless`, blocks begin at the multiples of L in each epoch, whose last block is short.

    The cost of blocks: neighbours in a shard are in the same batch. A batch of 256 out of 11,000 shards of
    1,018 images spans 253 shards for L = 1, 32 for L = 8 and 8 for L = 32. The variance of the gradient is
    then that of 256/L to 256 independent samples, depending on the similarity of neighbours. In SA-1B the
    images of a shard are a random part of one source tar; L = 8 is a good compromise for a disk that seeks.
    """

    count: int  # samples in the view, N, 1 to 2**32
    digest: str  # identifies the view's set of images (`View.digest`); others have another order
    seed: int
    block_size: int = 1  # L, samples that stay together
    endless: bool = True  # a step may begin in one epoch and end in the next

    def rows(self, positions: Int64) -> Int64:
        """The rows at these positions, int64, same shape: 0 to N - 1. Positions may span epochs.

        Takes 20 ns per position in large calls and 20 us for 256 positions; releases the GIL.
        """
        epochs, places = np.divmod(positions, self.count)
        out = np.empty(epochs.shape, np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            part = np.empty(np.count_nonzero(chosen), np.int64)
            order_kernels.rows(places[chosen].astype(np.uint64), *_epoch(self, epoch), part)
            out[chosen] = part
        return out

    def locate(self, positions: Int64) -> Located:
        """The positions as they are: this order has one source."""
        return np.zeros(len(positions), np.int64), positions, np.ones(len(positions), np.bool_)

    def check_step(self, position: int) -> None:
        """ValueError if a step may not begin at this position, because it cuts a block."""
        if (position if self.endless else position % self.count) % self.block_size:
            raise BadValue(f"position={position} must be at the border of two blocks of {self.block_size}")

    def substitute(self, position: int, attempt: int) -> int:
        """The row for a damaged one: hash(seed, position, attempt) mod N; attempts count from 0."""
        return random_word(self.seed, Purpose.SUBSTITUTE, position, attempt) % self.count


@dataclass(frozen=True, slots=True)
class Sequential:
    """The order of evaluation: rows 0 to N - 1, each exactly once over all ranks, then padding.

    It takes ceil(N / G) global batches. Positions from N on repeat the last row, marked invalid. With N = 7,
    G = 4, W = 2, rank 0 takes rows 0 1, 4 5, and rank 1 takes rows 2 3, 6 (6), the last one invalid.
    """

    count: int
    counts: tuple[int, ...] = ()  # of a mixture: the samples of each source, read one after the other

    endless: ClassVar[bool] = False
    block_size: ClassVar[int] = 1

    def rows(self, positions: Int64) -> Int64:
        return np.minimum(positions, self.count - 1)

    def locate(self, positions: Int64) -> Located:
        """For each position the number of its source, the row in this source, and whether it is valid."""
        rows, starts = self.rows(positions), self._starts()
        source: Int64 = np.searchsorted(starts[1:], rows, "right")
        return source, rows - starts[source], positions < self.count

    def seen(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        starts = self._starts()
        return tuple(np.clip(position - starts[:-1], 0, np.diff(starts)).tolist())

    def _starts(self) -> Int64:
        return np.cumsum((0, *(self.counts or (self.count,))), dtype=np.int64)


class Phase(NamedTuple):
    """The weights of the sources from a position on: whole numbers without a common divisor."""

    start: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The order of a mixture, for training: the source of each position, and the position in that source.

    With weights w of sum W, each source has w of every W positions. Its number of samples in the first p
    positions differs from p * w / W by less than one, so that n positions have at least n * w / W - 2 of
    them, rounded up; of two sources, n * w / W, rounded down or up. With the weights 3 and 1 of A and B:

        position    0 1 2 3  4 5 6 7
        source      A A B A  A A B A
        its sample  0 1 0 2  3 4 1 5

    The sources of one period are a table; everything else is computed from the position. They are chosen by
    earliest deadline: of the sources whose next sample is due, the one that must come first. This keeps the
    deviation of k sources below 1 - 1 / (2k - 2) (R. Tijdeman, The chairman assignment problem, 1980).

    `phases` begin at ascending positions, the first at 0. `until` is the end of an iteration: when the first
    source has been used once, or when all have; None is one endless iteration.
    """

    counts: tuple[int, ...]  # samples of each source in one epoch of it
    phases: tuple[Phase, ...]
    until: Literal["first", "all"] | None = None
    count: int = field(init=False)  # positions of an iteration; of an endless one, until all sources are used
    before: tuple[tuple[int, ...], ...] = field(init=False)  # samples of each source before each phase

    block_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        before = [(0,) * len(self.counts)]
        for phase, after in pairwise(self.phases):
            before.append(_seen(phase, before[-1], after.start))
        object.__setattr__(self, "before", tuple(before))
        ends = [self.position_of(source, count - 1) for source, count in enumerate(self.counts)]
        finite = [end + 1 for end in ends if end is not None]
        if self.until == "all" and None in ends:
            raise BadValue(
                f"until='all': source {ends.index(None)} has weight 0 before all its samples are used; give "
                "it a weight in the last phase"
            )
        object.__setattr__(self, "count", min(finite) if self.until == "first" else max(finite, default=1))

    @property
    def endless(self) -> bool:
        return self.until is None

    def locate(self, positions: Int64) -> Located:
        """For each position the number of its source, the position in this source, and True, all of [N]."""
        source, local = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted([phase.start for phase in self.phases], positions, "right") - 1
        for number in np.unique(numbers).tolist():
            here, phase = numbers == number, self.phases[number]
            sources, ranks = _period(phase.weights)
            turn, rest = np.divmod(positions[here] - phase.start, len(sources))
            chosen = sources[rest]
            source[here] = chosen
            local[here] = (
                np.take(self.before[number], chosen) + turn * np.take(phase.weights, chosen) + ranks[rest]
            )
        return source, local, np.ones(len(positions), np.bool_)

    def phase_at(self, position: int) -> tuple[Phase, tuple[int, ...]]:
        """The phase of a position, and the samples of each source before this phase."""
        number = sum(phase.start <= position for phase in self.phases) - 1
        return self.phases[number], self.before[number]

    def seen(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        return _seen(*self.phase_at(position), position)

    def position_of(self, source: int, index: int) -> int | None:
        """The position of a sample of a source, counted over its epochs; None if it is never used."""
        for phase, before, after in zip(self.phases, self.before, (*self.before[1:], None), strict=True):
            weight = phase.weights[source]
            if weight and (after is None or index < after[source]):
                turn, rank = divmod(index - before[source], weight)
                sources, _ = _period(phase.weights)
                return phase.start + turn * len(sources) + int(np.flatnonzero(sources == source)[rank])
        return None


def whole_weights(values: Sequence[object]) -> tuple[int, ...]:
    """Weights, numbers or text such as "1/3", as whole numbers without a common divisor; 0.1 is 1/10."""
    shown = ", ".join(map(str, values))
    try:
        weights = [Fraction(str(value)) for value in values]
    except (ValueError, ZeroDivisionError) as error:
        raise BadValue(f"weights={shown}: {error}; pass numbers, or texts such as '1/3'") from None
    if min(weights) < 0 or not any(weights):
        raise BadValue(f"weights={shown}: must be from 0, and at least one above 0")
    scale = lcm(*(weight.denominator for weight in weights))
    divisor = gcd(*(int(weight * scale) for weight in weights))
    whole = tuple(int(weight * scale) // divisor for weight in weights)
    if (period := sum(whole)) > MAX_PERIOD:
        raise BadValue(
            f"weights={shown}: repeat after {period:,} positions, and the limit is {MAX_PERIOD:,}; round them"
        )
    return whole


def _seen(phase: Phase, before: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Samples of each source before a position of a phase, of which some lie before the phase."""
    sources, _ = _period(phase.weights)
    turn, rest = divmod(position - phase.start, len(sources))
    within = np.bincount(sources[:rest], minlength=len(before))
    return tuple((before + turn * np.array(phase.weights) + within).tolist())


@lru_cache(maxsize=64)
def _period(weights: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], Int64]:
    """The source of each position of a period, and how many samples of it come before in the period."""
    sources, ranks = np.zeros(sum(weights), np.int32), np.arange(sum(weights))
    if len(weights) > 1:
        order_kernels.fill_period(np.array(weights, np.int64), sources, ranks)
    return sources, ranks


def check_global_batch(global_batch: int, world_size: int, block_size: int = 1) -> None:
    """ValueError if a global batch has too few samples or blocks for the ranks, or cuts a block."""
    if global_batch % block_size:
        raise BadValue(f"global_batch={global_batch} must be a multiple of block_size={block_size}")
    units = global_batch // block_size
    if world_size > units:
        what = "samples" if block_size == 1 else f"blocks of {block_size} samples"
        raise BadValue(
            f"global_batch={global_batch}: has {units} {what} for {world_size} ranks, so some would have no "
            "work; pass a larger global batch, or use fewer ranks"
        )


def rank_slice(
    position: int, samples: int, rank: int, world_size: int, *, block_size: int = 1
) -> tuple[int, int]:
    """The positions [start, stop) that a rank takes in the step [position, position + samples): of B blocks,
    of which the last one of an epoch may be short, rank r takes those from r*B//W to (r+1)*B//W.
    """
    if not 0 <= rank < world_size:
        raise BadValue(
            f"rank={rank} must be from 0 to {world_size - 1}, below world_size={world_size}; pass both"
        )
    blocks = -(-samples // block_size)
    start, stop = (min(block_size * (r * blocks // world_size), samples) for r in (rank, rank + 1))
    return position + start, position + stop


def whole_share(samples: int, world_size: int, block_size: int = 1) -> int:
    """The least `size` with which every rank runs one micro-batch in a step. See `check_global_batch`."""
    check_global_batch(samples, world_size, block_size)
    return _largest_slice(samples, world_size, block_size)


def micro_batch_count(samples: int, world_size: int, size: int, *, block_size: int = 1) -> int:
    """Number of micro-batches of at most `size` samples that every rank runs in a step."""
    return -(-_largest_slice(samples, world_size, block_size) // size)


def _largest_slice(samples: int, world_size: int, block_size: int) -> int:
    slices = (rank_slice(0, samples, rank, world_size, block_size=block_size) for rank in range(world_size))
    return max(stop - start for start, stop in slices)


@lru_cache(maxsize=64)
def _epoch(order: Order, epoch: int) -> tuple[Words, EpochSizes]:
    # The bijection: a generalised Feistel network of seven rounds permutes 0 to N - 1, and the result is
    # rotated by a random number modulo N. The network works on pairs (left, right), left < ceil(sqrt(N)),
    # right < ceil(N / ceil(sqrt(N))), with addition modulo these sizes. A pair whose number is N or more
    # passes through the network again (cycle walking; at most one in sqrt(N) does). Keys: the 64 bytes of
    # blake2b(f"{digest}:{seed}:{epoch}", person "sa1b-order-1") as eight little-endian words. Seven are the
    # round keys; the last one modulo N is the rotation.
    text = f"{order.digest}:{order.seed}:{epoch}".encode()
    words = np.frombuffer(hashlib.blake2b(text, digest_size=64, person=b"sa1b-order-1").digest(), "<u8")
    head = min(-epoch * order.count % order.block_size, order.count) if order.endless else 0
    units = (order.count - head) // order.block_size
    tall = isqrt(max(units, 1) - 1) + 1
    wide = max(1, -(-units // tall))
    shift = int(words[ROUNDS]) % order.count
    sizes = map(np.uint64, (order.count, order.block_size, head, units, tall, wide, shift))
    return words[:ROUNDS].astype(np.uint64), cast(EpochSizes, tuple(sizes))
