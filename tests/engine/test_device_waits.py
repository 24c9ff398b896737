"""A training step uses one device, and reads no number from it: the host would wait for the device.

The step runs on the device "meta", on which tensors have no values: an operation that needs one raises an error,
and so does one on tensors of two devices, unless one of them is a copy, or an index.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sa1b import Batch
from sa1b.engine.config import build
from sa1b.engine.model import declared
from sa1b.engine.planner import blank_batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.gradients import finish
from sa1b.engine.step.optim import freeze
from sa1b.recipes.presets import PRESETS

META = torch.device("meta")


class OfTheHost(TorchDispatchMode):
    """Collects the operations on tensors of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(one.device.type == "cpu" for one in tensors):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model asks about the autocast of its device, which "meta" does not have."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def batch_of(config: Any) -> Batch:
    size, image_size = config.image_size // 4, config.image_size
    batch = blank_batch(2, config.data.masks, image_size, size)
    return batch.map_tensors(
        lambda _, one: torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=META)
    )


@pytest.mark.parametrize("feedback_gradient", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("on_meta")
def test_a_step_of_training_and_an_evaluation_stay_on_the_device(feedback_gradient: bool) -> None:
    config = PRESETS["tiny"]
    config = replace(
        config, recipe=replace(config.recipe, clicks=2, unprompted=1, feedback_gradient=feedback_gradient)
    )
    with META:
        module = build(config, None)
    freeze(module, config.optim)
    inputs = declared(module).inputs(batch_of(config), config.seed)
    with OfTheHost() as operations:
        sums = module(*inputs)
        torch.autograd.backward(sums["loss"])
        optimizer: Any = None
        scaler: Any = SimpleNamespace(unscale_=lambda _: None)
        rank_info = RankInfo(0, 1, 0, META)
        norm = finish(module, optimizer, scaler, sums["count"].detach(), rank_info, grad_clip=1.0)
        scores = module.eval()(*inputs, evaluate=True)
    assert operations.found == []
    assert {one.device.type for one in (*sums.values(), *scores.values(), norm)} == {"meta"}
    assert all(one.grad is not None for one in module.parameters() if one.requires_grad)
