"""A step of the training loop reads numbers from the device once: where the ranks exchange the figures.

Every other read would let the host wait for the device. On the CPU, the reads are counted instead: calls of Python
that return values of a tensor, and operations whose result has a size that depends on values.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sa1b import train
from sa1b.engine import config as settings
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.watchdog import Phases
from sa1b.recipes.presets import PRESETS
from tests.train.command import BATCH, FLAGS

STEPS = 4
CALLS = {
    getattr(Tensor, name): name
    for name in (
        *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "__repr__"),
    )
}
OPERATIONS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
}
BETWEEN_STEPS = ("data", "warm up", "checkpoint", "evaluation", "start", "resume")


class Reads:
    """The reads of each part of the steps: part, name of the call or operation -> number."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.found: Counter[tuple[str, str]] = Counter()

    def add(self, name: str) -> None:
        if self.phases.steps and self.phases.current.name not in BETWEEN_STEPS:
            self.found[self.phases.current.name, name] += 1


class Calls(TorchFunctionMode):
    """Counts calls of Python."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CALLS and not (func is Tensor.numpy and args[0].device.type != "cpu"):
            self.reads.add(CALLS[func])
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations, also those of the backward pass."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        masks = (index for index in (args[1] if name in ("aten::index", "aten::index_put_") else ()))
        if name in OPERATIONS or any(mask is not None and mask.dtype is torch.bool for mask in masks):
            self.reads.add(name)
        return func(*args, **(kwargs or {}))


def run_of(root: Path, out: Path, *flags: str) -> train.Run:
    arguments = ["--data.root", str(root), "--out", str(out), *FLAGS, "--optim.steps", str(STEPS), *flags]
    config = settings.parse(arguments, None, PRESETS, None).resolved()
    return train.begin(config, RankInfo(0, 1, 0, torch.device("cpu"), None), Phases())


def reads_of(run: train.Run) -> Counter[tuple[str, str]]:
    reads = Reads(run.phases)
    try:
        with Calls(reads), Operations(reads):
            train.train(run)
    finally:
        train.close(run)
    assert run.step == STEPS
    return reads.found


def test_the_exchange_of_figures_is_the_only_read_of_a_step(root: Path, tmp_path: Path) -> None:
    flags = ("--data.micro-batch", str(BATCH), "--optim.ema", "0.9", "--parallel.precision", "bf16")
    run = run_of(root, tmp_path / "run", *flags)
    assert reads_of(run) == {("sync", "tolist"): STEPS}


def test_a_further_read_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(root, tmp_path / "run", "--data.micro-batch", str(BATCH))
    compute = run.training.forward_backward

    def reading(batch: Any, step: int, number: int = 1) -> dict[str, Tensor]:
        sums = compute(batch, step, number)
        if sums["count"] > 0:
            sums["loss"] = sums["loss"][None][sums["count"][None] > 0].sum()
        return sums

    monkeypatch.setattr(run.training, "forward_backward", reading)
    found = reads_of(run)
    assert found["compute", "__bool__"] == STEPS
    assert found["compute", "aten::index"] == STEPS
