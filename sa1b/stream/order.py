"""The order of training as a formula: which sample is at a position, and which rank takes which positions.

Positions count the samples of all epochs, from 0 on; epoch e of N samples is [e*N, (e+1)*N). In each epoch
a keyed bijection maps the positions to the rows 0 to N - 1: a full shuffle, another one each epoch, without
a table. The only state of a run is the position p that its next step begins at.

A step takes the global batch [p, p + G), and of it rank r of W takes [p + r*G//W, p + (r+1)*G//W): slices
that differ by one sample at most. G and W may change at any step. With p = 0, G = 8, W = 3:

    rank 0 [0, 2)    rank 1 [2, 5)    rank 2 [5, 8)

Every rank must take part in equally many micro-batches, or collectives wait for ever. Their number follows
from G, W and the micro-batch size m alone: the largest slice is ceil(G / W) samples, so it is
ceil(ceil(G / W) / m). A slice is cut into pieces of m from its start, so the last ones may be short or empty;
an empty one runs every collective all the same. With m = 1 above, three micro-batches each:

    rank 0 [0, 1) [1, 2) [2, 2)    rank 1 [2, 3) [3, 4) [4, 5)    rank 2 [5, 6) [6, 7) [7, 8)

So for 8 ranks, G = 256 and m = 16: slices of 32, two full micro-batches. 3 ranks go on with [85, 85, 86] in
six micro-batches: 5 * 16 + 5 and 5 * 16 + 6, nothing lost and nothing repeated.

Where the end of an epoch ends an iteration, the last step takes only what is left, g = N mod G samples, and
divides them alike: ceil(ceil(g / W) / m) micro-batches on every rank. With N = 1,000, 8 ranks, G = 256 and
m = 16, the fourth step takes 232 samples: 29 a rank, as 16 + 13. With N = 1,028 a fifth step takes 4: ranks
1, 3, 5 and 7 have one sample, the others an empty micro-batch. An endless order takes [p, p + G) across the
border.

The bijection. Of the N rows, rotated by a random number, a generalised Feistel network of seven rounds
permutes 0 to N - 1 as pairs (left, right), left < ceil(sqrt(N)), right < ceil(N / ceil(sqrt(N))), with
addition modulo these sizes; a pair whose number is N or more goes through it again (cycle walking: at most
one in sqrt(N) does). Keys: the 64 bytes of blake2b(f"{digest}:{seed}:{epoch}", person "sa1b-order-1") as
eight little-endian words, seven for the rounds, the last modulo N for the rotation.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Purpose, Words, random_word
from sa1b.stream import order_kernels
from sa1b.stream.order_kernels import ROUNDS, EpochSizes

MAX_COUNT = 1 << 32  # row numbers are u32


@dataclass(frozen=True, slots=True)
class Order:
    """The shuffled order of a view, for training.

    With `block_size` L > 1, blocks of L positions hold L rows that follow one another (cyclically), so that
    one read can fetch them; row numbers must then count samples by shard and offset, as `View.by_place`
    does. A block stays together, in one rank's slice and one read, while steps begin at its border and global
    batches are multiples of L, which `check_step` and `check_global_batch` verify. Each epoch cuts the rows
    into blocks at another row. Every row comes once an epoch, also where L does not divide N:

    - with `endless`, blocks begin at the multiples of L, counted over all epochs. The last short piece of an
      epoch and the first of the next share a block's positions, so that all later blocks stay aligned.
    - without, they begin at the multiples of L in each epoch, whose last block is short.

    Its cost: neighbours in a shard are seen together. A batch of 256 out of 11,000 shards of 1,018 images
    spans 253 shards for L = 1, 32 for L = 8 and 8 for L = 32: the gradients of 256 samples vary between
    steps as much as those of 256 to 256/L independent ones, depending on how alike neighbours are. In SA-1B
    the images of a shard are a random part of one source tar; L = 8 is a good price on a disk that seeks.

    Attributes:
        count: samples in the view, N, 1 to 2**32.
        digest: names the view's set of images (`View.digest`); other images have another order.
        seed: another seed, another order.
        block_size: L, samples that stay together.
        endless: a step may begin in one epoch and end in the next.

    Raises:
        ValueError: count or block_size out of range, or an empty digest.
    """

    count: int
    digest: str
    seed: int
    block_size: int = 1
    endless: bool = True

    def __post_init__(self) -> None:
        _check_count(self.count)
        if self.block_size < 1:
            raise ValueError(f"a block of {self.block_size} samples; it must be 1 or more")
        if not self.digest:
            raise ValueError("an order needs the digest of its view: without it, all views share one order")

    def rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at these positions, int64, same shape: 0 to N - 1. Positions may span epochs.

        20 ns a position in large calls, 10 us for 256 positions; releases the GIL.

        Raises:
            ValueError: a negative position.
        """
        positions = _checked(positions)
        if positions.size == 0:
            return np.empty(positions.shape, np.int64)
        flat = positions.reshape(-1)
        out = np.empty(len(flat), np.int64)
        first, last = int(flat.min()) // self.count, int(flat.max()) // self.count
        if first == last:
            self._epoch_rows(first, flat, out)
        else:
            epochs = flat // self.count
            for epoch in np.unique(epochs).tolist():
                chosen = np.flatnonzero(epochs == epoch)
                part = np.empty(len(chosen), np.int64)
                self._epoch_rows(epoch, flat[chosen], part)
                out[chosen] = part
        return out.reshape(positions.shape)

    def _epoch_rows(self, epoch: int, positions: npt.NDArray[np.int64], out: npt.NDArray[np.int64]) -> None:
        keys, sizes = _epoch(self, epoch)
        order_kernels.rows((positions - epoch * self.count).astype(np.uint64), keys, sizes, out)

    def check_step(self, position: int) -> None:
        """Verify that a step may begin at this position.

        Raises:
            ValueError: it is negative or cuts a block.
        """
        if position < 0:
            raise ValueError(f"position {position} is negative")
        if (position if self.endless else position % self.count) % self.block_size:
            raise ValueError(
                f"a step that begins at position {position} cuts a block of {self.block_size} samples"
            )

    def substitute(self, position: int, attempt: int) -> int:
        """The row to take where that of `position` is damaged: hash(seed, position, attempt) mod N.

        attempt: 0 for the first substitute, 1 if that is damaged too, and so on.
        """
        return random_word(self.seed, Purpose.SUBSTITUTE, position, attempt) % self.count


@dataclass(frozen=True, slots=True)
class Sequential:
    """The order of evaluation: rows 0 to N - 1, each exactly once over all ranks, then padding.

    ceil(N / G) global batches cover it; positions from N on repeat the last row, marked invalid. With N = 7,
    G = 4, W = 2: rank 0 takes rows 0 1, 4 5; rank 1 takes rows 2 3, 6 (6), the last one invalid.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self.count)

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The rows at these positions, int64, and whether each counts, bool; same shape.

        Raises:
            ValueError: a negative position.
        """
        positions = _checked(positions)
        return np.minimum(positions, self.count - 1), positions < self.count


def check_global_batch(global_batch: int, world_size: int, block_size: int = 1) -> None:
    """Verify that a global batch gives every rank something to do and cuts no block.

    Raises:
        ValueError: fewer samples (or blocks) than ranks, or no multiple of the block size.
    """
    if global_batch % block_size:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of block_size={block_size}: it would cut a block"
        )
    units = global_batch // block_size
    if world_size > units:
        what = "samples" if block_size == 1 else f"blocks of {block_size} samples"
        raise ValueError(
            f"{world_size} ranks for a global batch of {units} {what}: some would have nothing to do; "
            "make the global batch larger or take fewer ranks"
        )


def rank_slice(
    position: int, samples: int, rank: int, world_size: int, *, block_size: int = 1
) -> tuple[int, int]:
    """The positions [start, stop) that a rank takes in the step [position, position + samples).

    With L = `block_size` > 1 whole blocks are distributed: with B = ceil(samples / L) of them, rank r takes
    those from r*B//W to (r+1)*B//W. The last block of an epoch may be short.

    Raises:
        ValueError: a rank out of range or a negative position.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} of {world_size}: ranks are numbered 0 to {world_size - 1}; pass rank and "
            "world_size together"
        )
    if position < 0:
        raise ValueError(f"position {position} is negative")
    blocks = -(-samples // block_size)
    start, stop = (min(block_size * (r * blocks // world_size), samples) for r in (rank, rank + 1))
    return position + start, position + stop


def micro_batch_count(samples: int, world_size: int, size: int, *, block_size: int = 1) -> int:
    """How many micro-batches of at most `size` samples every rank runs in a step of so many samples.

    Raises:
        ValueError: size below 1.
    """
    if size < 1:
        raise ValueError(f"a micro-batch of {size} samples; it must be 1 or more")
    blocks = -(-samples // block_size)
    largest = min(-(-blocks // world_size) * block_size, samples)
    return -(-largest // size)


def micro_batches(start: int, stop: int, size: int, count: int) -> list[tuple[int, int]]:
    """A rank's slice as `count` micro-batches [start, stop) of `size` samples, the last short or empty.

    A block stays within one micro-batch if its length divides `size`.

    Raises:
        ValueError: the slice does not fit into so many.
    """
    if not 0 <= stop - start <= size * count:
        raise ValueError(f"[{start}, {stop}) does not fit into {count} micro-batches of {size} samples")
    cuts = [min(start + i * size, stop) for i in range(count + 1)]
    return list(pairwise(cuts))


@lru_cache(maxsize=64)
def _epoch(order: Order, epoch: int) -> tuple[Words, EpochSizes]:
    """Round keys and sizes of one epoch."""
    text = f"{order.digest}:{order.seed}:{epoch}".encode()
    words = np.frombuffer(hashlib.blake2b(text, digest_size=64, person=b"sa1b-order-1").digest(), "<u8")
    head = min(-epoch * order.count % order.block_size, order.count) if order.endless else 0
    units = (order.count - head) // order.block_size
    tall = max(1, _root(units))
    wide = max(1, -(-units // tall))
    shift = int(words[ROUNDS]) % order.count
    sizes = (order.count, order.block_size, head, units, tall, wide, shift)
    count, block, first, whole, left, right, turn = map(np.uint64, sizes)
    return words[:ROUNDS].astype(np.uint64), (count, block, first, whole, left, right, turn)


def _root(number: int) -> int:
    """The smallest integer whose square is at least number."""
    return isqrt(number - 1) + 1 if number else 0


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"an order of {count:,} samples; it must be from 1 to {MAX_COUNT:,}")


def _checked(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    positions = np.asarray(positions, np.int64)
    if positions.size and int(positions.min()) < 0:
        raise ValueError(f"position {int(positions.min())} is negative")
    return positions
