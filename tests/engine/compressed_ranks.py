"""The runs with compressed gradients that the ranks of a launch do; the tests check their results."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.model import unwrap
from sa1b.engine.ranks.compression import PowerSGD
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import reduction_of
from tests.engine.launch import group
from tests.engine.traffic import Traffic
from tests.engine.training import OPTIM, Run, begin

POWER = ParallelConfig(mode="ddp", compress="powersgd:2", compress_after=2)
CURVES = {
    "none": ParallelConfig(mode="ddp"),
    "fp16": ParallelConfig(mode="ddp", compress="fp16"),
    "bf16": ParallelConfig(mode="ddp", compress="bf16"),
    "bf16, zero1, 3 micro-batches": ParallelConfig(mode="zero1", compress="bf16"),
    "powersgd:2": POWER,
    "powersgd:2, zero1": replace(POWER, mode="zero1"),
}
STEPS = 6


def curves() -> dict[str, dict[str, Any]]:
    """Losses of this rank over some steps, the bytes of the last one, and the weights."""
    found = {}
    for name, config in CURVES.items():
        with group(config) as rank_info:
            run = begin(
                rank_info, config, 3 if "micro" in name else 1, optim=replace(OPTIM, steps=STEPS), second=True
            )
            for number in range(STEPS - 1):
                run.step(number)
            with Traffic() as traffic:
                run.step(STEPS - 1)
            found[name] = {
                "losses": run.losses,
                "sent": sum(traffic.sent["allreduce"]),
                "weights": run.weights(),
            }
    return found


def interrupted() -> dict[str, Any]:
    """States of PowerSGD before and after a skipped step, and after the steps with and without it."""
    with group(POWER) as rank_info:
        run = begin(rank_info, POWER, second=True)
        fresh = state(run)
        for number in range(4):
            run.step(number)
        before = state(run)
        spoiled_step(run, 4)
        spoiled = state(run)
        reduction = reduction_of(run.module)
        assert reduction is not None
        reduction.undo()
        after = state(run)
        run.step(4)
        end = run.weights()
    with group(POWER) as rank_info:
        run = begin(rank_info, POWER, second=True)
        for number in range(5):
            run.step(number)
        straight = run.weights()
    return {
        "fresh": fresh, "before": before, "spoiled": spoiled, "after": after, "end": end, "straight": straight
    }  # fmt: skip


def buckets() -> dict[tuple[str, float], dict[str, Any]]:
    """Steps with buckets of several sizes, in MiB: their number, losses of this rank, weights and state."""
    found = {}
    for mode, size in (("ddp", 1), ("ddp", 0.1), ("ddp", 0.01), ("zero1", 0.01)):
        config = replace(POWER, mode=mode)
        with group(config) as rank_info:
            run = begin(rank_info, replace(config, bucket=size), second=True)
            for number in range(4):
                run.step(number)
            assert isinstance(run.module, DistributedDataParallel)
            sizes = run.module._get_ddp_logging_data()["rebuilt_bucket_sizes"]
            found[mode, size] = {
                "buckets": len(sizes.split(",")),
                "losses": run.losses,
                "weights": run.weights(),
                "state": state(run)[1],
            }
    return found


def without_gradient_for_a_step() -> dict[str, float]:
    """Norms of a weight's gradient after the reduction: in a step without a gradient, and two steps later."""
    with group(POWER) as rank_info:
        run = begin(rank_info, POWER, second=True)
        for number in range(3):
            run.step(number)
        name = "blocks.0.qkv.weight"
        parameter = unwrap(run.module).get_parameter(name)
        handle = parameter.register_hook(torch.zeros_like)
        powersgd = reduction_of(run.module)
        assert powersgd is not None
        for tensor in powersgd.tensors().values():
            tensor.zero_()  # as if the gradient had always been zero
        norms = {}
        for number in (3, 4, 5):
            if number == 4:
                handle.remove()
            run.step(number, lambda _, number=number: norms.update({number: float(parameter.grad.norm())}))
        return norms


def spoiled_step(run: Run, number: int) -> None:
    """The backward pass of a step with a gradient that is not finite on one rank, without the optimizer."""
    last = run.rank_info.world_size - 1
    parameter = next(p for name, p in run.named() if name.endswith("qkv.weight"))
    handle = parameter.register_hook(
        lambda gradient: gradient * torch.nan if run.rank_info.rank == last else gradient
    )
    for micro in run.batches(run.rank_info, number, 1):
        run.accumulate(micro, last=True)
    handle.remove()
    run.optimizer.zero_grad()


def state(run: Run) -> tuple[dict[str, Any], dict[str, Tensor]]:
    found = reduction_of(run.module)
    assert isinstance(found, PowerSGD)
    return found.state_dict(), {name: tensor.clone() for name, tensor in found.tensors().items()}
