"""The phase of a run that a rank is in, the seconds of each, and the seconds of a forward pass.

    phases = Phases()
    while step < steps:
        phases.begin(step)
        for number, batch in phases.numbered("data", feed.step()):     # waits for micro-batch `number`
            with phases.part("compute", number):
                ...
    phases.current                                                     # of this moment, for any thread
    phases.seconds["data"]                                             # of this step

A rank is always in one phase. `PARTS` are the parts of a step, whose seconds are recorded. The time between
them is `OTHER`. Further phases are "start", "resume", "warm up", "evaluation" and "closing".

    data        waiting for batches
    compute     forward and backward passes; with several ranks also waiting for their gradients
    sync        reduction and clipping of the gradient, and exchange: waiting for the other ranks
    update      optimizer
    checkpoint  saving; an asynchronous save only copies here

On a GPU, kernels of `compute` may end during `sync`, which reads the figures and waits for the device.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

PARTS = ("data", "compute", "sync", "update", "checkpoint")
OTHER = "other"
EVALUATION = "evaluation"
T = TypeVar("T")


class Phase(NamedTuple):
    name: str  # one of `PARTS`, `OTHER` or another phase of the run
    step: int  # counted from 0
    micro_batch: int  # counted from 1; 0 if it concerns none
    began: float  # seconds on the clock of time.perf_counter


class Phases:
    """The phases of one rank. One thread sets them, and any thread may read `current`.

    Attributes:
        seconds: of each phase since the step began, without the current one.
        began: start of the step on the clock of time.perf_counter.
        steps: steps begun in this process.
        reading: returns the sample that this rank waits for, with its shard and offset, or None.
    """

    def __init__(self) -> None:
        self.began, self.steps = time.perf_counter(), 0
        self.reading: Callable[[], str | None] = lambda: None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.current = Phase("start", 0, 0, self.began)

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
        self.current = Phase(name, last.step if step is None else step, micro_batch, now)

    @contextmanager
    def part(self, name: str, micro_batch: int = 0) -> Iterator[None]:
        """Context for a phase within the current one, which continues after it. After an error it remains,
        so that `current` tells where the error occurred.
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
        """Seconds since the step began, without those of an evaluation after it."""
        return time.perf_counter() - self.began - self.seconds[EVALUATION]


class ForwardTime:
    """The time of a module's forward passes; on a GPU between two events, without a wait."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event if device.type == "cuda" else None
        self._begin: Any = None
        self._last: tuple[Any, Any] | None = None
        self._complete: tuple[Any, Any] | None = None
        module.register_forward_pre_hook(self._begins)
        module.register_forward_hook(self._ends)

    def seconds(self) -> float:
        """Of the last pass before the last call, which the device has completed; NaN at the first call."""
        pair, self._complete = self._complete, self._last
        if pair is None:
            return math.nan
        begin, end = pair
        return end - begin if self._event is None else float(begin.elapsed_time(end)) / 1e3

    def _begins(self, *_: object) -> None:
        self._begin = self._now()

    def _ends(self, *_: object) -> None:
        self._last = self._begin, self._now()

    def _now(self) -> Any:
        if self._event is None:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event
