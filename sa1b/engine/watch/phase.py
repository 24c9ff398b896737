"""The phase of a run that a rank is in, and the duration of each part of a step.

    phases = Phases()
    while step < steps:
        phases.begin(step)
        for number, batch in phases.numbered("data", feed.step()):     # waits for micro-batch `number`
            with phases.part("compute", number):
                ...
        with phases.part("sync"):
            ...
    phases.current                                                     # of this moment, for any thread
    phases.seconds["data"]                                             # of this step

A rank is always in one phase. `PARTS` are the parts of a step, whose seconds are recorded. The time between
them is `OTHER`. Before and after its steps a rank goes through further phases: "start", "resume", "warm up",
"evaluation" and "closing".

All ranks go through the same phases in the same order, so the rank that has begun the fewest phases is the
one that the others wait for. A phase that only some ranks go through must not be added.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

PARTS = ("data", "compute", "sync", "update", "checkpoint")
OTHER = "other"
T = TypeVar("T")


class Phase(NamedTuple):
    """A phase of a rank.

    Attributes:
        name: one of `PARTS`, `OTHER` or another phase of the run.
        step: step of the phase, counted from 0.
        micro_batch: micro-batch of the phase, counted from 1; 0 if it concerns none.
        number: phases that began before this one.
        began: when it began, seconds on the clock of time.perf_counter.
    """

    name: str
    step: int
    micro_batch: int
    number: int
    began: float


class Phases:
    """The phases of one rank. One thread sets them, and any thread may read `current`.

    Beginning a phase is an addition and the write of a tuple. With their contexts, the phases of a step with
    two micro-batches take 23 µs (timeit on a CPU).

    The parts of a step, on this process's clock:

        data        waiting for batches
        compute     forward and backward passes; with several ranks also waiting for their gradients
        sync        reduction and clipping of the gradient, and exchange: waiting for the other ranks
        update      optimizer
        checkpoint  saving; an asynchronous save only copies here

    On a GPU, kernels of `compute` may end during `sync`, which reads the figures and waits for the device.
    Kernels of the optimizer may end during the next step.

    Attributes:
        current: the phase of this moment.
        seconds: seconds of each phase since the step began, without those of the current phase. A caller may
            move seconds from one part to another.
        began: start of the step on the clock of time.perf_counter.
        observer: called with each phase when it begins, if it is set.
        steps: steps begun in this process.
        reading: returns the sample that this rank waits for, with its shard and offset; None if it waits for
            none. Any thread may call it.
    """

    def __init__(self) -> None:
        self.observer: Callable[[Phase], None] | None = None
        self.began = time.perf_counter()
        self.steps = 0
        self.reading: Callable[[], str | None] = lambda: None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.current = Phase("start", 0, 0, 0, self.began)

    def begin(self, step: int) -> None:
        """Begin a step: all its parts have 0 seconds."""
        self.enter(OTHER, step=step)
        self.steps += 1
        self.began = self.current.began
        self.seconds.clear()

    def enter(self, name: str, micro_batch: int = 0, *, step: int | None = None) -> None:
        """End the current phase and begin another one, by default of the same step."""
        now, last = time.perf_counter(), self.current
        self.seconds[last.name] += now - last.began
        self.current = Phase(name, last.step if step is None else step, micro_batch, last.number + 1, now)
        if self.observer is not None:
            self.observer(self.current)

    @contextmanager
    def part(self, name: str, micro_batch: int = 0) -> Iterator[None]:
        """Context for a phase within the current one, which continues after it.

        The time within is not added to the outer phase. After an error the phase remains, so that `current`
        tells where the error occurred.
        """
        outer = self.current
        self.enter(name, micro_batch)
        yield
        self.enter(outer.name, outer.micro_batch)

    def numbered(self, name: str, items: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Items with their numbers from 1; waiting for an item is a phase, its number the micro-batch."""
        iterator, number = iter(items), 0
        while True:
            number += 1
            with self.part(name, number):
                item = next(iterator, None)
            if item is None:
                return
            yield number, item

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.began
