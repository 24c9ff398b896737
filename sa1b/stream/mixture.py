"""A mixture of several orders as a formula: the source of each position, and the position in that source.

With weights w of sum W, each source has w of every W positions. Its number of samples in the first p
positions differs from p * w / W by less than one. So a slice of n positions, such as that of a rank, has at
least n * w / W - 2 samples of each source, rounded up. If there are only two sources, it has n * w / W
samples, rounded down or up. With the weights 3 and 1 of sources A and B:

    position    0 1 2 3  4 5 6 7
    source      A A B A  A A B A
    its sample  0 1 0 2  3 4 1 5

The sources of one period are a table; everything else is computed from the position. They are chosen by
earliest deadline: of the sources whose next sample is due, the one that must come first. This keeps the
deviation of k sources below 1 - 1 / (2k - 2) (R. Tijdeman, The chairman assignment problem, 1980).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.stream import order_kernels
from sa1b.stream.order import Located, Sequential, checked_positions

MAX_PERIOD = 1 << 20  # positions; the table of a period takes 12 bytes each

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Phase:
    """The weights of the sources from a position on: whole numbers without a common divisor."""

    start: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The order of a mixture, for training.

    `phases` begin at ascending positions, the first at 0. `until` is the end of an iteration: when the first
    source has been used once, or when all have; None is one endless iteration. ValueError: a source is in no
    phase, or it is never used completely although `until` is "all".
    """

    counts: tuple[int, ...]  # samples of each source in one epoch of it
    phases: tuple[Phase, ...]
    until: Literal["first", "all"] | None = None
    count: int = field(init=False)  # positions of an iteration; of an endless one, until all sources are used
    before: tuple[tuple[int, ...], ...] = field(init=False)  # samples of each source before each phase

    block_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        before = [np.zeros(len(self.counts), np.int64)]
        for phase, after in zip(self.phases, self.phases[1:], strict=False):
            before.append(before[-1] + _prefix(phase.weights, after.start - phase.start))
        object.__setattr__(self, "before", tuple(tuple(counts.tolist()) for counts in before))
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
        positions = checked_positions(positions)
        source, local = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted([phase.start for phase in self.phases], positions, "right") - 1
        for number in np.unique(numbers).tolist():
            here, phase = np.flatnonzero(numbers == number), self.phases[number]
            counts = np.array((phase.weights, self.before[number]))
            period = _period(phase.weights)
            order_kernels.locate(here, positions, phase.start, counts, *period, source, local)
        return source, local, np.ones(len(positions), np.bool_)

    def seen(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        number = sum(phase.start <= position for phase in self.phases) - 1
        phase = self.phases[number]
        here = _prefix(phase.weights, position - phase.start)
        return tuple((np.array(self.before[number]) + here).tolist())

    def position_of(self, source: int, index: int) -> int | None:
        """The position of a sample of a source, counted over its epochs; None if it is never used."""
        for phase, before, after in zip(self.phases, self.before, (*self.before[1:], None), strict=True):
            weight = phase.weights[source]
            if weight and (after is None or index < after[source]):
                turn, rank = divmod(index - before[source], weight)
                sources, _ = _period(phase.weights)
                return phase.start + turn * len(sources) + int(np.flatnonzero(sources == source)[rank])
        return None

    def check_step(self, position: int) -> None:
        """ValueError if a step may not begin at this position: it is negative."""
        checked_positions(position)


@dataclass(frozen=True, slots=True)
class Concatenated(Sequential):
    """The order of an evaluation of several sources: each sample of each source once, one source after the
    other, then padding; see `Sequential`.
    """

    counts: tuple[int, ...]

    def locate(self, positions: Int64) -> Located:
        """For each position the number of its source, the row in this source, and whether it is valid."""
        rows, valid = self.rows(positions)
        ends: Int64 = np.cumsum(self.counts, dtype=np.int64)
        source: Int64 = np.searchsorted(ends, rows, "right")
        return source, rows - (ends - self.counts)[source], valid

    def seen(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        ends = np.cumsum(self.counts)
        return tuple(np.clip(position - (ends - self.counts), 0, self.counts).tolist())


def whole_weights(values: Sequence[object]) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor. They may be int, float, Fraction, or text such as
    "1/3"; a float is read as it is printed, 0.1 as 1/10. ValueError: a weight is negative or no number, all
    are 0, or their period has more than 2**20 positions.
    """
    weights = [fraction_of(value) for value in values]
    scale = lcm(*(weight.denominator for weight in weights))
    divisor = gcd(*(int(weight * scale) for weight in weights))
    if not divisor:
        raise BadValue("weights: all are 0; at least one source must have a positive weight")
    whole = [int(weight * scale) // divisor for weight in weights]
    if sum(whole) > MAX_PERIOD:
        raise BadValue(
            f"weights={', '.join(map(str, values))}: repeat after {sum(whole):,} positions, and the limit is "
            f"{MAX_PERIOD:,}; round them"
        )
    return tuple(whole)


def fraction_of(value: object) -> Fraction:
    """The weight of a source. ValueError: it is negative or no number."""
    valid = isinstance(value, int | float | str | Fraction | np.integer | np.floating)
    if valid and not isinstance(value, bool):
        try:
            if (weight := Fraction(str(value))) >= 0:
                return weight
        except (ValueError, ZeroDivisionError):
            pass
    raise BadValue(f"weight={value!r} must be a number from 0, or text such as '1/3'")


def _prefix(weights: tuple[int, ...], positions: int) -> Int64:
    sources, _ = _period(weights)
    turn, rest = divmod(positions, len(sources))
    return turn * np.array(weights, np.int64) + np.bincount(sources[:rest], minlength=len(weights))


@lru_cache(maxsize=64)
def _period(weights: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], Int64]:
    """The source of each position of a period, and how many samples of it come before in the period."""
    sources = np.zeros(sum(weights), np.int32)
    ranks = np.arange(len(sources))
    if len(weights) > 1:
        order_kernels.fill_period(np.array(weights, np.int64), sources, ranks)
    return sources, ranks
