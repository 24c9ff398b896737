"""One step in each combination of settings; the tests check their results."""

from typing import Any

from torch import nn

from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import Buffers
from tests.engine.launch import group
from tests.engine.training import begin


def shared_buffers() -> list[float]:
    """The buffers of a module whose ranks have different ones, before and after the ranks share them."""
    with group(ParallelConfig(mode="ddp")) as rank_info:
        module = nn.BatchNorm1d(1)
        module.running_mean.fill_(rank_info.rank + 1)
        buffers = Buffers(module, shared=True)
        buffers.share()
        return [float(one) for one in module.buffers()]


def first_steps(configs: dict[str, ParallelConfig]) -> dict[str, dict[str, Any]]:
    """Loss of this rank, and norm of the gradient, in the first two steps."""
    found = {}
    for name, config in configs.items():
        with group(config) as rank_info:
            run = begin(rank_info, config, accumulation=2)
            if config.precision == "fp16":  # without an overflow in the first steps
                run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 128.0})
            for number in range(2):
                run.step(number)
            found[name] = {"losses": run.losses, "norms": run.norms}
    return found
