"""The optimizer and its learning rates: AdamW, layer-wise decay, schedules that are functions of the step.

The defaults are the published recipe of ViT-H ("Segment Anything", Kirillov et al. 2023, appendix A): AdamW
with betas 0.9 and 0.999, weight decay 0.1, layer-wise decay 0.8, 8e-4 at a batch of 256 images, 250 steps of
linear warm-up, a tenth of the learning rate at 60,000 and again at 86,666 of 90,000 steps. The paper
specifies no limit of the gradient norm; the default here is 1, and SAM 2 has 0.1.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from sa1b.console import counted
from sa1b.engine.model import Limited, declared
from sa1b.errors import UsageError


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Optimizer, learning rates and schedule.

    Attributes:
        lr: Learning rate of the last layer after warm-up, at the reference batch.
        reference_batch: Global batch, in images, for which --optim.lr is specified.
        batch_scaling: How the learning rate scales with the global batch: linear, sqrt, or none.
        schedule: step: a tenth at each milestone. cosine: half a cosine down to --optim.min-lr-ratio times
            the learning rate. rsqrt: 1 / sqrt(1 + t / timescale), t steps after warm-up, and linearly to zero
            at the end (Zhai et al., "Scaling Vision Transformers", 2022).
        steps: Length of the schedule in steps.
        epochs: Length of the schedule in epochs, such as 2 or 0.5, in place of --optim.steps; rounded up to
            complete steps.
        warmup: Steps in which the learning rate rises linearly.
        milestones: For step: steps after which the learning rate falls to a tenth.
        min_lr_ratio: For cosine: fraction of the learning rate at the end.
        timescale: For rsqrt: steps after warm-up until the learning rate has fallen by the square root of 2.
        cooldown: For rsqrt: number of last steps, in which the learning rate falls linearly to zero.
        layer_decay: Ratio of the learning rates of each layer and the next one; 1: the same for all layers.
            The model numbers its layers.
        weight_decay: Weight decay; biases, norms and position embeddings have none.
        beta1: Decay of the running mean of gradients.
        beta2: Decay of the running mean of squared gradients.
        epsilon: Added to the root of the running mean of squared gradients.
        grad_clip: Largest norm of the gradient over all parameters; 0: no limit.
        ema: Decay of the running mean of the weights, such as 0.9999; 0: no running mean. The mean is
            evaluated and exported instead of the weights. The decay of the first steps is smaller: it
            is (1 + step) / (10 + step). A run with a running mean cannot resume without it. A run without a
            running mean can resume with it; the mean then starts from the weights of the checkpoint.
        freeze: Parts of the model that are not trained, by the names of its submodules (image_encoder).
            They run as in evaluation, without drop path or dropout.
        fitting: no flag. Of warmup and cooldown those that were not passed beside --optim.epochs.
    """

    lr: float = 8e-4
    reference_batch: int = 256
    batch_scaling: Literal["linear", "sqrt", "none"] = "linear"
    schedule: Literal["step", "cosine", "rsqrt"] = "step"
    steps: int = 90_000
    epochs: float | None = None
    warmup: int = 250
    milestones: tuple[int, ...] = (60_000, 86_666)
    min_lr_ratio: float = 0.0
    timescale: int = 1_000
    cooldown: int = 0
    layer_decay: float = 0.8
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    grad_clip: float = 1.0
    ema: float = 0.0
    freeze: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    fitting: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse invalid settings.

        Raises:
            UsageError: the message names the flag.
        """
        for flag in ("lr", "reference_batch", "steps", "timescale", "epsilon"):
            if not getattr(self, flag) > 0:
                raise UsageError(f"--optim.{_dashed(flag)} {getattr(self, flag)}: must be more than 0")
        if self.epochs is not None and not self.epochs > 0:
            raise UsageError(f"--optim.epochs {self.epochs}: must be more than 0")
        for flag in ("warmup", "cooldown", "weight_decay", "grad_clip"):
            if not getattr(self, flag) >= 0:
                raise UsageError(f"--optim.{_dashed(flag)} {getattr(self, flag)}: must not be negative")
        for flag in ("beta1", "beta2", "ema"):
            if not 0 <= getattr(self, flag) < 1:
                raise UsageError(f"--optim.{flag} {getattr(self, flag)}: must be from 0 to below 1")
        if not 0 < self.layer_decay <= 1:
            raise UsageError(f"--optim.layer-decay {self.layer_decay}: must be above 0 and at most 1")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UsageError(f"--optim.min-lr-ratio {self.min_lr_ratio}: must be from 0 to 1")
        if self.min_lr_ratio and self.schedule != "cosine":
            raise UsageError(
                f"--optim.min-lr-ratio: is for --optim.schedule cosine, not {self.schedule}; drop one"
            )
        if self.cooldown and self.schedule != "rsqrt":
            raise UsageError(
                f"--optim.cooldown: is for --optim.schedule rsqrt, not {self.schedule}; drop one"
            )
        if self.cooldown and self.warmup + self.cooldown > self.steps:
            raise UsageError(
                f"--optim.warmup {self.warmup}, --optim.cooldown {self.cooldown}: must not be more than "
                f"--optim.steps {self.steps} together"
            )
        if self.warmup >= self.steps:
            raise UsageError(f"--optim.warmup {self.warmup}: must be less than --optim.steps {self.steps}")
        marks = pairwise([self.warmup, *self.milestones])
        if self.schedule == "step" and any(one >= other for one, other in marks):
            raise UsageError(
                f"--optim.milestones {self.milestones}: must be in ascending order and after "
                f"--optim.warmup {self.warmup}"
            )

    def with_steps(self, images: int, global_batch: int) -> tuple["OptimConfig", list[str]]:
        """These settings with the steps of `epochs`, if it is set, in complete steps; see `fitted`.

        Args:
            images: images of an epoch.
            global_batch: images of a step.

        Raises:
            UsageError: these steps do not fit the schedule.
        """
        if self.epochs is None:
            return self, []
        steps = max(math.ceil(self.epochs * images / global_batch), 1)
        try:
            return replace(self, fitting=()).fitted(steps, self.fitting)
        except UsageError as error:
            raise UsageError(
                f"--optim.epochs {self.epochs:g}: is {counted(steps, 'step')}; {error}"
            ) from None

    def fitted(self, steps: int, fitting: Collection[str]) -> tuple["OptimConfig", list[str]]:
        """These settings with another number of steps, and lines that describe what changed.

        Args:
            fitting: of warmup and cooldown those that may be shortened in proportion, if they do not fit.

        Raises:
            UsageError: the steps do not fit the schedule.
        """
        changed: dict[str, Any] = {"steps": steps}
        notes = list[str]()
        for name in fitting if steps <= self.warmup + self.cooldown else ():
            if before := getattr(self, name):
                changed[name] = before * steps // self.steps
                notes.append(
                    f"--optim.{name} {changed[name]}: the preset's {before} of {self.steps:,} steps, in "
                    f"proportion to --optim.steps {steps}"
                )
        return replace(self, **changed), notes


def freeze(module: nn.Module, config: OptimConfig) -> None:
    """Set requires_grad to False for frozen parts, so that autograd records no backward pass through them.

    They are in evaluation mode from now on, which `module.train()` would end. Call it before `wrap` and
    `make_optimizer`, on all ranks.

    Raises:
        UsageError: the model has no such part, and the message lists its parts; or no parameter is left.
    """
    weights = declared(module).weights()
    for part in config.freeze:
        try:
            weights.get_submodule(part).requires_grad_(False).eval()
        except AttributeError:
            parts = ", ".join(name for name, _ in weights.named_children())
            raise UsageError(f"--optim.freeze {part}: no such part; choose from {parts}") from None
    if not any(parameter.requires_grad for parameter in weights.parameters()):
        raise UsageError(
            f"--optim.freeze {' '.join(config.freeze)}: leaves no parameter to train; name fewer parts"
        )


def make_optimizer(module: nn.Module, config: OptimConfig, batch: int, *, sharded: bool = False) -> Optimizer:
    """AdamW over the parameters that are trained, one group per layer and kind of decay.

    Groups are in the order of layers, and parameters in the order of the module. Both orders are the same in
    all modes and on all ranks. "lr_scale" of each group is its factor on the learning rate, for `set_lr`.

    Args:
        module: the result of `wrap`, or a module that is never wrapped. FSDP replaces parameters, so an
            optimizer of the unwrapped module would be invalid.
        batch: images in the global batch.
        sharded: each rank keeps the state of an equal share of the parameters, updates this share, and
            receives the other parameters from the ranks that update them (ZeRO-1); collective. See
            `of_rank` for this rank's part of the optimizer.

    Raises:
        UsageError: no parameter is trained.
    """
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
    if not groups:
        raise UsageError("--optim.freeze: no parameter of the model requires a gradient; freeze fewer parts")
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
    settings: dict[str, Any] = {
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "fused": True,  # one kernel for all weights, on GPUs and CPUs; leaves fp16's overflow on the device
    }
    optimizer: Optimizer
    if sharded:
        # The weights become views of one tensor for each rank, so that each rank sends its share at once.
        optimizer = ZeroRedundancyOptimizer(described, AdamW, parameters_as_bucket_view=True, **settings)
    else:
        optimizer = AdamW(described, **settings)
    if isinstance(model, Limited):
        optimizer.register_step_post_hook(partial(_limit, dict(weights.named_parameters()), model.largest))
    return optimizer


@torch.no_grad()
def _limit(parameters: Mapping[str, nn.Parameter], largest: Mapping[str, float], *_: Any) -> None:
    for name, value in largest.items():
        _local(parameters[name].detach()).clamp_(max=value)


def of_rank(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose state this rank keeps: a part of a sharded optimizer, or the optimizer itself."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def peak_lr(config: OptimConfig, batch: int) -> float:
    """Learning rate of the last layer after warm-up, for a global batch of `batch` images.

    Raises:
        UsageError: batch is not positive.
    """
    if batch < 1:
        raise UsageError(f"global batch {batch}: must be at least 1 image")
    ratio = batch / config.reference_batch
    return config.lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[config.batch_scaling]


def lr_line(config: OptimConfig, batch: int) -> str:
    """One line that explains the learning rate."""
    return (
        f"learning rate {peak_lr(config, batch):g}: {config.lr:g} at "
        f"{counted(config.reference_batch, 'image')}, "
        f"scaled to {batch} ({config.batch_scaling}); {counted(config.warmup, 'step')} of warm-up, "
        f"then {config.schedule}"
    )


def lr_at(config: OptimConfig, batch: int, step: int) -> float:
    """Learning rate of the last layer in a step, counted from 0; a function of its arguments only.

    Step 0 has 1 / warmup of the peak; step warmup - 1 is the first one at the peak. After the end of the
    schedule, the learning rate is constant.

    Raises:
        UsageError: step is negative, or batch is not positive.
    """
    if step < 0:
        raise UsageError(f"step {step}: must not be negative")
    peak = peak_lr(config, batch)
    if step < config.warmup:
        return peak * ((step + 1) / config.warmup)  # at most the peak, in floating point too
    if config.schedule == "step":
        return peak * 0.1 ** bisect_right(config.milestones, step)
    if config.schedule == "rsqrt":
        left = max(config.steps - step, 0)
        cooled = min(left / config.cooldown, 1.0) if config.cooldown else 1.0
        return peak * cooled / math.sqrt(1 + (step - config.warmup) / config.timescale)
    passed = min((step - config.warmup) / (config.steps - config.warmup), 1.0)
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * passed)) / 2)


def set_lr(optimizer: Optimizer, rate: float) -> None:
    """Set each group's learning rate for the next step: `rate` times the group's "lr_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


@torch.no_grad()
def update_ema(optimizer: Optimizer, config: OptimConfig, step: int) -> None:
    """Update the running mean of the weights after an optimizer step, counted from 0.

    The mean is part of the optimizer's state, as "ema" of each parameter: float32, and sharded, saved and
    loaded like the rest of the state. Parameters that are not trained have no mean. If there is no mean yet,
    it starts from the weights after this step.
    """
    if not config.ema:
        return
    pairs = [(parameter, state) for parameter, state in of_rank(optimizer).state.items() if state]
    for parameter, state in pairs:
        if "ema" not in state:
            state["ema"] = parameter.detach().clone()
    means = [_local(state["ema"]) for _, state in pairs]
    decay = min(config.ema, (1 + step) / (10 + step))
    torch._foreach_lerp_(means, [_local(parameter) for parameter, _ in pairs], 1 - decay)


@contextmanager
def averaged(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Context in which the module's weights are replaced by their running mean, if there is one.

    After an error the mean stays in place: with a sharded optimizer the ranks exchange the weights, and this
    rank would wait for the others in place of reporting its error.
    """
    _swap(module, optimizer)
    yield
    _swap(module, optimizer)


@torch.no_grad()
def _swap(module: nn.Module, optimizer: Optimizer) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered copies would be out of date
    for parameter, state in of_rank(optimizer).state.items():
        if "ema" in state:
            own, mean = _local(parameter.detach()), _local(state["ema"])
            before = own.clone()
            own.copy_(mean)
            mean.copy_(before)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        cast(Any, optimizer)._sync_params()  # each rank has the means of its share only


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
