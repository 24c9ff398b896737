"""The optimizer and its learning rates: AdamW, layer-wise decay, schedules that are functions of the step.

The defaults are the published recipe of ViT-H ("Segment Anything", Kirillov et al. 2023, appendix A), with a
limit of the gradient norm, 1, of which the paper says nothing; SAM 2 has 0.1.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from sa1b.console import counted
from sa1b.engine.model import declared
from sa1b.engine.settings import OptimConfig
from sa1b.errors import UsageError


def freeze(module: nn.Module, config: OptimConfig) -> None:
    """Freeze parts, before `wrap` and `make_optimizer`, in evaluation mode, which `module.train()` ends."""
    weights = declared(module).weights()
    for part in config.freeze:
        try:
            weights.get_submodule(part).requires_grad_(False).eval()
        except AttributeError:
            parts = ", ".join(name for name, _ in weights.named_children())
            raise UsageError(f"--optim.freeze {part}: no such part; choose from {parts}") from None


def make_optimizer(module: nn.Module, config: OptimConfig, batch: int) -> Optimizer:
    """AdamW over the trained parameters, a group per layer, with its factor "lr_scale", and kind of decay."""
    model = declared(module)
    weights = model.weights()
    layers = {name: model.layer_of(name) for name, _ in weights.named_parameters()}
    last = max((layer for layer in layers.values() if layer is not None), default=0) + 1
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in weights.named_parameters():
        if parameter.requires_grad:
            layer = layers[name]
            key = (last if layer is None else layer, model.decays(name, parameter))
            groups.setdefault(key, []).append(parameter)
    peak = peak_lr(config, batch)
    described = [
        {
            "params": parameters,
            "lr": peak * config.layer_decay ** (last - layer),
            "lr_scale": config.layer_decay ** (last - layer),
            "weight_decay": config.weight_decay if decaying else 0.0,
        }
        for (layer, decaying), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]
    # fused: one kernel for all weights, on GPUs and CPUs; leaves fp16's overflow on the device
    return AdamW(described, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)


def peak_lr(config: OptimConfig, batch: int) -> float:
    ratio = batch / config.reference_batch
    return config.lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[config.batch_scaling]


def lr_line(config: OptimConfig, batch: int) -> str:
    return (
        f"learning rate {peak_lr(config, batch):g}: {config.lr:g} at "
        f"{counted(config.reference_batch, 'image')}, "
        f"scaled to {batch} ({config.batch_scaling}); {counted(config.warmup, 'step')} of warm-up, "
        f"then {config.schedule}"
    )


def lr_at(config: OptimConfig, batch: int, step: int) -> float:
    """Learning rate of the last layer in a step, counted from 0; step warmup - 1 is the first at the peak."""
    peak = peak_lr(config, batch)
    if step < config.warmup:
        return peak * ((step + 1) / config.warmup)  # in this order, rounding cannot exceed the peak
    if config.schedule == "step":
        return peak * 0.1 ** bisect_right(config.milestones, step)
    if config.schedule == "rsqrt":
        left = max(config.steps - step, 0)
        cooled = min(left / config.cooldown, 1.0) if config.cooldown else 1.0
        return peak * cooled / math.sqrt(1 + (step - config.warmup) / config.timescale)
    passed = min((step - config.warmup) / (config.steps - config.warmup), 1.0)
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * passed)) / 2)


def set_lr(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


@torch.no_grad()
def update_ema(optimizer: Optimizer, config: OptimConfig, step: int) -> None:
    """Update the running mean of the weights, "ema" in the optimizer's state, after a step from 0."""
    if not config.ema:
        return
    pairs = [(parameter, state) for parameter, state in optimizer.state.items() if state]
    for parameter, state in pairs:
        if "ema" not in state:
            state["ema"] = parameter.detach().clone()
    means = [_local(state["ema"]) for _, state in pairs]
    decay = min(config.ema, (1 + step) / (10 + step))
    torch._foreach_lerp_(means, [_local(parameter) for parameter, _ in pairs], 1 - decay)


@contextmanager
def averaged(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Context in which the module's weights are replaced by their running mean, if there is one."""
    _swap(module, optimizer)
    yield  # after an error the mean stays in place
    _swap(module, optimizer)


@torch.no_grad()
def _swap(module: nn.Module, optimizer: Optimizer) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered copies would be out of date
    for parameter, state in optimizer.state.items():
        if "ema" in state:
            weight, mean = _local(parameter.detach()), _local(state["ema"])
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
