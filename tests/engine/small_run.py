"""A run so small that it writes hundreds of checkpoints per second."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.settings import CheckpointConfig


class SmallRun:
    """Set every number of model and optimizer to the step."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def become(self, step: int) -> None:
        for parameter, values in self.optimizer.state.items():
            for tensor in (parameter, *values.values()):
                tensor.fill_(step)

    def steps(self) -> set[float]:
        """The set of all numbers; it has one element if the state is consistent."""
        tensors = [*self.model.parameters()]
        for values in self.optimizer.state.values():
            tensors += values.values()
        return set(torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist())


def write_run(run: Path, steps: tuple[int, ...], **options: Any) -> SmallRun:
    """Create a run that saves at these steps."""
    small = SmallRun()
    checkpoints = Checkpoints(run, CheckpointConfig(**options))
    for step in steps:
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})
    checkpoints.close()
    return small


def resume(run: Path) -> tuple[Any, SmallRun]:
    small = SmallRun()
    small.become(-1)
    checkpoints = Checkpoints(run, CheckpointConfig())
    try:
        return checkpoints.resume(small.model, small.optimizer), small
    finally:
        checkpoints.close()


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / folder_name(step)


def save_until_killed(run: Path, first: int) -> None:
    torch.set_num_threads(1)
    small = SmallRun()
    checkpoints = Checkpoints(run, CheckpointConfig())
    for step in range(first, first + 100_000):
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})
