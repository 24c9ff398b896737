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
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.stream import order_kernels
from sa1b.stream.order import Int64, Located

MAX_PERIOD = 1 << 20  # positions; the table of a period takes 12 bytes each


class Phase(NamedTuple):
    """The weights of the sources from a position on: whole numbers without a common divisor."""

    start: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The order of a mixture, for training.

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
        for phase, after in zip(self.phases, self.phases[1:], strict=False):
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

    def phase_at(self, position: int) -> int:
        """The number of the phase of a position."""
        return sum(phase.start <= position for phase in self.phases) - 1

    def seen(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        number = self.phase_at(position)
        return _seen(self.phases[number], self.before[number], position)

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
    whole = [int(weight * scale) for weight in weights]
    divisor = gcd(*whole)
    period = sum(whole) // divisor
    if period > MAX_PERIOD:
        raise BadValue(
            f"weights={shown}: repeat after {period:,} positions, and the limit is {MAX_PERIOD:,}; round them"
        )
    return tuple(weight // divisor for weight in whole)


def _seen(phase: Phase, before: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Samples of each source before a position of a phase, of which some lie before the phase."""
    sources, _ = _period(phase.weights)
    turn, rest = divmod(position - phase.start, len(sources))
    within = np.bincount(sources[:rest], minlength=len(before))
    return tuple((before + turn * np.array(phase.weights) + within).tolist())


@lru_cache(maxsize=64)
def _period(weights: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], Int64]:
    """The source of each position of a period, and how many samples of it come before in the period."""
    sources = np.zeros(sum(weights), np.int32)
    ranks = np.arange(len(sources))
    if len(weights) > 1:
        order_kernels.fill_period(np.array(weights, np.int64), sources, ranks)
    return sources, ranks
