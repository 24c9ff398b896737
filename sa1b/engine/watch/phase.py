"""The phase of a run that a rank is in, and the seconds that it works and waits in each part of a step.

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

    times = RankTime(phases, module, rank_info)
    times.backward(loss)                                       # in place of loss.backward()
    times.seconds()                            # {"data": ..., "compute": ..., "sync": ..., "update": ...}
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.ranks.rank_info import RankInfo

PARTS = ("data", "compute", "sync", "update", "checkpoint")
OTHER = "other"
T = TypeVar("T")


class Phase(NamedTuple):
    name: str  # one of `PARTS`, `OTHER` or another phase of the run
    step: int  # counted from 0
    micro_batch: int  # counted from 1; 0 if it concerns none
    number: int  # phases that began before this one
    began: float  # seconds on the clock of time.perf_counter


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
        seconds: of each phase since the step began, without the current one. A caller may move seconds to
            another part.
        began: start of the step on the clock of time.perf_counter.
        observer: called with each phase when it begins, if it is set.
        steps: steps begun in this process.
        reading: returns the sample that this rank waits for, with its shard and offset, or None. Any thread
            may call it.
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


WORK = ("data", "compute", "update")  # a rank's own work; "sync" is waiting and communication
_TIMED = ("unshard", "wait_for_unshard", "post_backward")


class Moment(Protocol):
    """A point in time on the clock of a device, with the interface of torch.cuda.Event."""

    def record(self) -> None:
        """Set it to the current time."""

    def synchronize(self) -> None:
        """Wait until it has passed."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this moment to another one."""


class HostMoment:
    """A point in time on the clock of this process."""

    __slots__ = ("_at",)

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """See `Moment`."""

    def elapsed_time(self, end_event: "HostMoment") -> float:
        return (end_event._at - self._at) * 1e3


class RankTime:
    """The times of one rank; `moment` makes a moment on the device's clock; `separable`: without waiting."""

    # All ranks wait for the slowest one, so the clock of a rank shows equally long steps everywhere. The
    # waiting happens within the forward and backward passes of the fast ranks. It is measured where it
    # happens and counted as synchronisation, so that the rest is each rank's own work:
    #
    # - DDP sends gradients while the backward pass continues, and waits after the last local gradient. That
    #   wait begins with a callback that torch calls when the backward pass has nothing left to compute. DDP's
    #   own callback, which waits, is queued later and is called later.
    # - FSDP gathers the weights of each unit before its forward and backward pass, and reduces its gradients
    #   after it. The methods that do so are timed: `unshard`, `wait_for_unshard` and `post_backward` of each
    #   group of parameters.
    #
    # These methods are not a public interface of torch. If one is missing, `separable` is False, and waits
    # count as work.
    #
    # On a CPU the clock is that of the process. On a GPU it is CUDA events in the stream of the computation,
    # so that a wait is the time in which that stream waits. The GPU's path has the same code with another
    # clock.
    #
    # The times cannot show a rank whose network is slow. All ranks wait equally long for its messages.

    def __init__(
        self,
        phases: Phases,
        module: nn.Module,
        rank_info: RankInfo,
        moment: Callable[[], Moment] | None = None,
    ) -> None:
        on_gpu, cuda = rank_info.device.type == "cuda", cast(Any, torch.cuda)
        self._new = moment or (partial(cuda.Event, enable_timing=True) if on_gpu else HostMoment)
        self._phases = phases
        self._step, self._steps = -1, -1  # current step, complete steps
        self._marks: list[tuple[str, Moment]] = []
        self._waits: list[tuple[str, Moment, Moment]] = []
        self._last: tuple[list[tuple[str, Moment]], list[tuple[str, Moment, Moment]]] = ([], [])
        self._waiting: Moment | None = None
        self._joins = isinstance(module, DistributedDataParallel | FSDPModule)
        self.separable = all(self._observe(group, name) for group in _fsdp_groups(module) for name in _TIMED)
        phases.observer = self._enter

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss; the time after its last local part counts as waiting."""
        if self._joins:
            engine = cast(Any, torch.autograd.Variable)._execution_engine
            cast(Any, loss).register_hook(lambda _: engine.queue_callback(self._begin_waiting))
        torch.autograd.backward(loss)
        self._end_waiting()

    def seconds(self) -> dict[str, float]:
        """Seconds of `data`, `compute`, `sync` and `update` of the last complete step.

        NaN in the first two steps of this process: the first one also fills the loader and is left out.
        `compute` is forward and backward, `update` the optimizer, both without waiting; `sync` is waiting for
        other ranks, the reduction and clipping of the gradient, and the exchange. On a GPU the host
        waits for the end of that step on the device.
        """
        marks, waits = self._last
        if not marks:
            return dict.fromkeys((*WORK, "sync"), math.nan)
        marks[-1][1].synchronize()
        totals: defaultdict[str, float] = defaultdict(float)
        for (name, begin), (_, end) in pairwise(marks):
            totals[name] += begin.elapsed_time(end) / 1e3
        for name, begin, end in waits:
            end.synchronize()
            totals[name] -= begin.elapsed_time(end) / 1e3
            totals["sync"] += begin.elapsed_time(end) / 1e3
        return {name: totals[name] for name in (*WORK, "sync")}

    def _enter(self, phase: Phase) -> None:
        if phase.name != OTHER and (phase.name not in PARTS or self._step < 0):
            return  # not within the steps of the run
        now = self._now()
        if phase.step != self._step:
            self._marks.append((OTHER, now))
            self._steps += 1
            if self._steps > 1:
                self._last = self._marks, self._waits
            self._step, self._marks, self._waits = phase.step, [], []
        self._marks.append((phase.name, now))

    def _now(self) -> Moment:
        moment = self._new()
        moment.record()
        return moment

    def _begin_waiting(self) -> None:
        if self._phases.current.name in WORK:  # and not in a warm-up or an evaluation
            self._waiting = self._now()

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waits.append((self._phases.current.name, self._waiting, self._now()))
            self._waiting = None

    @contextmanager
    def _wait(self) -> Iterator[None]:
        if self._waiting is not None:
            yield
            return
        self._begin_waiting()
        yield
        self._end_waiting()

    def _observe(self, owner: object, name: str) -> bool:
        """Time a method in which ranks wait; False if torch does not have it."""
        method = getattr(owner, name, None)
        if method is None:
            return False

        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self._wait():
                return method(*arguments, **options)

        setattr(owner, name, timed)
        return True


def _fsdp_groups(module: nn.Module) -> Iterator[object]:
    """FSDP's groups of parameters; a state without the attribute is a group without methods."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            # Before torch 2.12 a state has one group, or None.
            group = getattr(state, "_fsdp_param_group", state)
            yield from getattr(state, "_fsdp_param_groups", [] if group is None else [group])
