"""The rows of an order, computed by a compiled loop.

For an order of 11.2 million samples it takes 20 ns per position (`pytest benchmarks/test_order.py -s`).
"""

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Words
from sa1b.kernel import kernel

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
