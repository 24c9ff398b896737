"""The rows of an order and the period of a mixture, computed by compiled loops.

For an order of 11.2 million samples it takes 20 ns per position (`pytest benchmarks/test_order.py -s`).
"""

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Words
from sa1b.kernel import kernel

Int64 = npt.NDArray[np.int64]
EpochSizes = tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]

ROUNDS = 7  # number of rounds: four change the left half, three the right half

_ROUND = np.uint64(0xD6E8FEB86659FD93)  # multiplier of the order's round function

_1, _32 = np.uint64(1), np.uint64(32)


@kernel
def _scatter(half: np.uint64, key: np.uint64, size: np.uint64) -> np.uint64:
    """The round function: a keyed number below `size`, for `half` and `size` up to 2**16."""
    word = half + key
    word ^= word >> _32
    word *= _ROUND
    word ^= word >> _32
    word *= _ROUND
    return ((word >> _32) * size) >> _32


@kernel
def rows(positions: Words, keys: Words, sizes: EpochSizes, out: npt.NDArray[np.int64]) -> None:
    count, block, head, units, tall, wide, shift = sizes
    body = units * block
    for index in range(len(positions)):
        row = positions[index]
        if row >= head and row - head < body:
            unit, within = row - head, row - row
            if block > _1:
                unit //= block
                within = row - head - unit * block
            while True:
                left = unit // wide
                right = unit - left * wide
                for turn in range(0, ROUNDS, 2):
                    left += _scatter(right, keys[turn], tall)
                    if left >= tall:
                        left -= tall
                    if turn + 1 < ROUNDS:
                        right += _scatter(left, keys[turn + 1], wide)
                        if right >= wide:
                            right -= wide
                unit = left * wide + right
                if unit < units:
                    break
            row = head + unit * block + within
        row += shift
        if row >= count:
            row -= count
        out[index] = np.int64(row)


@kernel
def fill_period(weights: Int64, sources: npt.NDArray[np.int32], ranks: Int64) -> None:
    """The source of each position of a mixture's period, by earliest deadline, and its rank in the source."""
    taken = np.zeros(len(weights), np.int64)
    slack, total = 2 * len(weights) - 2, len(sources)
    for n in range(1, total + 1):
        chosen, earliest = -1, 0
        for number in range(len(weights)):
            weight = weights[number]
            # Due when n * weight / total - taken >= 1 / slack. The deadline is the last n at which that
            # difference is at most 1 - 1 / slack.
            if weight == 0 or slack * (n * weight - taken[number] * total) < total:
                continue
            deadline = (slack * (taken[number] + 1) - 1) * total // (slack * weight)
            if chosen < 0 or deadline < earliest:
                chosen, earliest = number, deadline
        sources[n - 1] = chosen
        ranks[n - 1] = taken[chosen]
        taken[chosen] += 1
