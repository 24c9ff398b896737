"""Phases and seconds of a rank: its own work is separated from its waiting for others, in DDP and FSDP."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import micro_batch
from sa1b.engine.watch.phase import OTHER, Phases, RankTime
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of

WORK = 0.5  # seconds


class Clock:
    """A clock of the test, and moments on it, as a GPU's events: each may be read after `synchronize`."""

    def __init__(self) -> None:
        self.now = 0.0

    def moment(self) -> "Reading":
        return Reading(self)


class Reading:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at, self.waited_for = clock, math.nan, False

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end_event: "Reading") -> float:
        return (end_event.at - self.at) * 1e3


def rank_time(phases: Phases, clock: Clock) -> RankTime:
    return RankTime(phases, nn.Linear(1, 1), place_of(), clock.moment)


def test_parts_are_those_of_the_last_complete_step_and_the_first_step_is_left_out() -> None:
    clock, phases = Clock(), Phases()
    times = rank_time(phases, clock)

    def spend(name: str, seconds: float) -> None:
        with phases.part(name):
            clock.now += seconds

    with phases.part("data"):
        clock.now += 100  # before the steps
    seen = []
    for step in range(5, 9):
        phases.begin(step)
        if step == 5:  # evaluated and warmed up before the first step
            spend("evaluation", 1000)
            spend("warm up", 1000)
            phases.begin(step)
        for _ in range(2):
            spend("data", step)
            spend("compute", 0.5)
        seen.append(times.seconds())
        spend("sync", 0.25)
        spend("update", 0.125)
        clock.now += 9
        spend("checkpoint", 7)
        spend("evaluation", 1000)
    assert all(math.isnan(value) for numbers in seen[:2] for value in numbers.values())
    assert seen[2] == {"data": 12.0, "compute": 1.0, "update": 0.125, "sync": 0.25}
    assert seen[3] == {**seen[2], "data": 14.0}


def test_waiting_in_a_warm_up_or_an_evaluation_does_not_count() -> None:
    clock, phases = Clock(), Phases()
    times = rank_time(phases, clock)
    for step in range(3):
        phases.begin(step)
        with phases.part("warm up"), times._wait():
            clock.now += 50
        with phases.part("compute"), times._wait(), times._wait():  # one within the other
            clock.now += 0.5
        with phases.part("update"), times._wait():
            clock.now += 0.25
    assert times.seconds() == {"data": 0.0, "compute": 0.0, "update": 0.0, "sync": 0.75}


class LogicalClock(Clock):
    """A clock that only the test's work moves; at the end of a wait it is at least that of all other ranks."""

    def __init__(self, file: Path, rank: int) -> None:
        super().__init__()
        self.all = np.memmap(file, "float64", "r+")
        self.rank = rank

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.all[self.rank] = self.now

    def meet(self) -> None:
        """The other ranks have come to the place at which this rank waited for them."""
        self.now = max(self.now, self.all.max())
        self.all[self.rank] = self.now


class LogicalTime(RankTime):
    """The times of a rank with a logical clock."""

    clock: LogicalClock

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self.clock.meet()  # DDP waits in C++
        super()._end_waiting()


class Worker(nn.Module):
    """Layers; the second one works for some seconds in its forward or backward pass."""

    def __init__(self, clock: LogicalClock, forward: float, backward: float) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.second(self.first(rows))
        self.clock.work(self.seconds[0])
        hidden.register_hook(lambda _: self.clock.work(self.seconds[1]))
        total: Tensor = self.third(hidden).sum()
        return total


def met(wait: Callable[..., Any], clock: LogicalClock, phases: Phases) -> Callable[..., Any]:
    """A wait of Python for other ranks in a part of a step, timed by RankTime or not."""

    def waited(*arguments: Any) -> Any:
        result = wait(*arguments)
        if phases.current.name != OTHER:
            clock.meet()
        return result

    return waited


def seconds_of(file: Path) -> dict[tuple[str, float, float], list[dict[str, float]]]:
    """The times of each rank in the last step, by mode and by the work of rank 1 in a pass; rank 0 has none."""
    wait = dist.Work.wait
    with group(ParallelConfig(mode="ddp")) as rank_info, pytest.MonkeyPatch.context() as patch:
        found = {}
        for case in itertools.product(("ddp", "fsdp"), ((WORK, 0.0), (0.0, WORK))):
            mode, forward, backward = case[0], *(rank_info.rank * seconds for seconds in case[1])
            clock = LogicalClock(file, rank_info.rank)
            phases = Phases()
            patch.setattr(dist.Work, "wait", met(wait, clock, phases))
            clock.work(0.0)
            dist.barrier()
            torch.manual_seed(0)
            module: nn.Module = Worker(clock, forward, backward)
            if mode != "fsdp":
                module = DistributedDataParallel(module)
            else:
                mesh = init_device_mesh("cpu", (rank_info.world_size,))
                for part in (*module.children(), module):
                    fully_shard(part, mesh=mesh)
            optimizer: Any = torch.optim.SGD(module.parameters())
            times = LogicalTime(phases, module, rank_info, clock.moment)
            times.clock = clock
            assert times.separable
            for step in range(3):
                phases.begin(step)
                for number in (1, 2):
                    with phases.part("compute"), micro_batch(module, last=number == 2):
                        times.backward(module(torch.ones(4, 8)))
                with phases.part("sync"):
                    dist.barrier()
                dist.barrier()  # no rank works on before all clocks have met
                with phases.part("update"):
                    optimizer.step()
                dist.barrier()
            phases.begin(3)
            of_all: list[dict[str, float]] = [{}] * rank_info.world_size
            waited = sum(end.elapsed_time(begin) for name, end, begin in times._last[1] if name == "compute")
            dist.all_gather_object(of_all, {**times.seconds(), "waited": waited / 1e3})
            found[case[0], *case[1]] = of_all
        return found


def test_the_others_wait_for_a_slow_rank_and_that_is_not_their_work(tmp_path: Path) -> None:
    np.zeros(2).tofile(tmp_path / "clocks")
    found = launch(seconds_of, 2, tmp_path / "clocks")[0]
    for (mode, *_), (fast, slow) in found.items():
        assert slow["compute"] == 2 * WORK, mode  # in each of two micro-batches
        assert fast["compute"] == fast["update"] == 0, mode
        assert fast["sync"] >= 2 * WORK, mode
        assert fast["waited"] >= WORK, mode  # and not only at the barrier
        assert slow["sync"] == 0, mode
        assert slow["update"] == 0, mode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_part_within_another_one_has_its_own_seconds(clock: list[float]) -> None:
    phases = Phases()
    phases.begin(7)
    clock[0] += 0.5
    with phases.part("compute", 2):
        clock[0] += 1.0
        with phases.part("sync"):
            clock[0] += 4.0
            assert phases.current[:3] == ("sync", 7, 0)
        assert phases.current[:3] == ("compute", 7, 2)
        clock[0] += 2.0
    assert phases.seconds == {OTHER: 0.5, "compute": 3.0, "sync": 4.0}
    assert phases.total() == 7.5
    phases.begin(8)
    assert phases.current[:3] == (OTHER, 8, 0)
    assert phases.total() == phases.seconds["compute"] == 0


def test_waiting_for_an_item_is_a_phase_with_its_number_and_working_on_it_is_not(clock: list[float]) -> None:
    phases = Phases()
    phases.begin(0)
    seen = []

    def items() -> Iterator[str]:
        for name in ("a", "b"):
            clock[0] += 1.0
            seen.append(phases.current[:3])
            yield name

    for number, name in phases.numbered("data", items()):
        seen.append((number, name, phases.current.name))
        clock[0] += 8.0
    assert seen == [("data", 0, 1), (1, "a", OTHER), ("data", 0, 2), (2, "b", OTHER)]
    assert (phases.seconds["data"], phases.seconds[OTHER]) == (2.0, 16.0)


def test_phases_are_counted_so_that_ranks_can_be_compared() -> None:
    one, other = Phases(), Phases()
    for phases in (one, other):
        phases.begin(0)
        list(phases.numbered("data", "ab"))
    assert one.current.number == other.current.number
    with one.part("sync"):
        assert one.current.number == other.current.number + 1


def test_after_an_error_the_phase_tells_where_it_occurred() -> None:
    phases = Phases()
    phases.begin(3)
    with pytest.raises(RuntimeError), phases.part("compute", 2), phases.part("sync"):
        raise RuntimeError
    assert phases.current[:3] == ("sync", 3, 0)
