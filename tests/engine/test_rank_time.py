"""A rank's own work is separated from its waiting for other ranks, under DDP and FSDP."""

import math
import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.gradients import micro_batch
from sa1b.engine.parallel import ParallelConfig
from sa1b.engine.phase import Phases
from sa1b.engine.rank_time import RankTime
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of

SLEEP = 0.1


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
    module = nn.Linear(1, 1)
    return RankTime(phases, module, torch.optim.SGD(module.parameters()), place_of(), clock.moment)


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


class Sleeper(nn.Module):
    """Layers; the second one sleeps in its forward or backward pass."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.seconds = forward, backward

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.second(self.first(rows))
        time.sleep(self.seconds[0])
        hidden.register_hook(lambda _: time.sleep(self.seconds[1]))
        total: Tensor = self.third(hidden).sum()
        return total


def seconds_of(forward: float, backward: float) -> dict[str, list[dict[str, float]]]:
    """By mode, the times of each rank in the median step. Rank 1 sleeps."""
    with group(ParallelConfig(mode="ddp")) as rank_info:
        found = {}
        slow = rank_info.rank == 1
        for mode in ("ddp", "fsdp", "zero1"):
            torch.manual_seed(0)
            module: nn.Module = Sleeper(forward * slow, backward * slow)
            if mode != "fsdp":
                module = DistributedDataParallel(module)
            else:
                mesh = init_device_mesh("cpu", (rank_info.world_size,))
                for part in (*module.children(), module):
                    fully_shard(part, mesh=mesh)
            phases = Phases()
            optimizer: Any = torch.optim.SGD(module.parameters())
            if mode == "zero1":
                optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD)
                optimizer.optim.register_step_pre_hook(lambda *_: time.sleep((forward + backward) * slow))
            times = RankTime(phases, module, optimizer, rank_info)
            assert times.separable
            steps = []
            for step in range(5):
                phases.begin(step)
                for number in (1, 2):
                    with phases.part("compute"), micro_batch(module, last=number == 2):
                        times.backward(module(torch.ones(4, 8)))
                with phases.part("sync"):
                    dist.barrier()
                with phases.part("update"):
                    optimizer.step()
                steps.append(times.seconds())
            own = {name: median(one[name] for one in steps[2:]) for name in ("compute", "sync", "update")}
            of_all: list[dict[str, float]] = [{}] * rank_info.world_size
            dist.all_gather_object(of_all, own)
            found[mode] = of_all
        return found


@pytest.mark.parametrize(
    ("forward", "backward"), [(SLEEP, 0.0), pytest.param(0.0, SLEEP, marks=pytest.mark.slow)]
)
def test_the_others_wait_for_a_slow_rank_and_that_is_not_their_work(forward: float, backward: float) -> None:
    found = launch(seconds_of, 2, forward, backward)[0]
    for fast, slow in found.values():
        assert slow["compute"] >= 2 * SLEEP  # in each of two micro-batches
        assert fast["compute"] < slow["compute"] / 2
        assert fast["sync"] > slow["sync"]
        assert fast["sync"] > SLEEP
    fast, slow = found["zero1"]
    assert slow["update"] >= SLEEP
    assert fast["update"] < SLEEP / 2
