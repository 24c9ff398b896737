"""The gradient of a global batch, accumulated over micro-batches and ranks.

Losses are sums over masks. Ranks and micro-batches have different numbers of masks, so a mean of means would
weight them wrongly. Instead the sums are back-propagated, and the gradients are divided once by the number of
masks in the global batch. DDP and FSDP average over ranks, so the factor is world size / masks.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sa1b.engine.precision import Precision, autocast
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import UsageError
from sa1b.hashing import Purpose, random_word
from sa1b.report import first_names


@contextmanager
def micro_batch(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Context for forward and backward of one micro-batch: only the last one of a step reduces gradients.

    Until then each rank keeps unsharded gradients in float32, under FSDP too.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def forward_backward(
    module: nn.Module,
    inputs: tuple[Any, ...],
    divisor: float,
    precision: Precision,
    rank_info: RankInfo,
    scaler: GradScaler,
) -> dict[str, Tensor]:
    """Add the gradient of a micro-batch's loss; return the model's sums, without gradient.

    In the context of `micro_batch`. The loss is divided by `divisor`, see `loss_divisor`; the caller must
    divide its count by it too.
    """
    with unused_named(module), autocast(precision, rank_info.device):
        sums: dict[str, Tensor] = module(*inputs)
    torch.autograd.backward(scaler.scale(sums["loss"] / divisor))
    return {name: value.detach() for name, value in sums.items()}


def seed_generators(seed: int, step: int, rank: int, number: int) -> None:
    """Seed torch's generators before the forward pass of a micro-batch, for models with dropout."""
    # Random values are then a function of these numbers: a resumed run repeats them, and ranks and
    # micro-batches have different ones.
    torch.manual_seed(random_word(seed, Purpose.GENERATOR, step, rank, number) >> 1)


def warm_up(module: nn.Module, run: Callable[[], object]) -> None:
    """Run a forward and backward pass, and no step, before the first step, and restore all state."""
    # In its first backward pass, DDP records the order of the gradients and rebuilds its buckets. With three
    # or more ranks it then sums in another order. Without this call, the first step after a resume would
    # differ in its last bits from the same step of an uninterrupted run. With it, every real step has the
    # final buckets. A static graph does not support accumulation in its first backward pass, the one of this
    # call, and its buckets are final only after the second pass. Compilation also happens here, for the
    # shapes of the run's micro-batches. `run` uses the scaler's scale and autocast.
    buffers = Buffers(module)
    buffers.keep()
    is_static = isinstance(module, DistributedDataParallel) and module.static_graph
    for _ in range(2 if is_static else 1):
        with micro_batch(module, last=True):
            run()
    buffers.restore()
    clear(module, module)


def clear(module: nn.Module, owner: nn.Module | Optimizer) -> None:
    """Clear the gradients of the module or optimizer `owner` after a step of the result of `wrap`."""
    # DDP's gradients are views of its buckets and are set to zero in place. Otherwise the next micro-batches
    # would accumulate in separate tensors, and the gradient would be stored twice until the last one. DDP
    # would also round them differently: it divides a view by the number of ranks, and multiplies another
    # tensor by the reciprocal of that number.
    owner.zero_grad(set_to_none=not isinstance(module, DistributedDataParallel))


@contextmanager
def unused_named(module: nn.Module) -> Iterator[None]:
    """Context for the forward pass: UsageError names parameters without a gradient in the last step."""
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if match is None:
            raise
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        names = [trained[int(number)].removeprefix("module.") for number in match[1].split()]
        raise UsageError(
            f"{first_names(names, 4)}: has no gradient in a step of this rank, and the other ranks wait "
            "for it; pass --parallel.find-unused if only some steps use it, or --optim.freeze"
        ) from None


def loss_divisor(expected: int) -> float:
    """The divisor of losses before the backward pass: about the largest possible count over all ranks."""
    # Sums over thousands of masks overflow float16 long before their mean does, and each overflow costs a
    # step until the scaler has lowered its scale. The divisor is a power of two, so it changes no rounding in
    # other formats.
    return 2.0 ** round(math.log2(expected))


@torch.no_grad()
def finish(
    module: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    count: Tensor,
    rank_info: RankInfo,
    *,
    grad_clip: float,
) -> Tensor:
    """Turn accumulated sums into the gradient of the global batch, and clip it; once, before the step.

    Collective: all ranks call it after their last micro-batch. `scaler.step` and `scaler.update` follow.
    `count`: masks in this rank's micro-batches (the sum of their weights), one number on the device, divided
    by the divisor of the losses. If all ranks have 0, the gradients are 0 and do not change. `grad_clip`:
    largest norm over all parameters and ranks; 0: no limit.

    Returns the norm before clipping, float32, no dimensions, the same on all ranks, on the gradients' device.
    The host does not wait for it. It is not finite after an overflow. In fp16 the scaler then skips the step;
    in other formats the caller decides.
    """
    scaler.unscale_(optimizer)
    total = count.detach().float().clone()
    if rank_info.world_size > 1:
        dist.all_reduce(total)
    for parameter in module.parameters():  # DDP has zeros for a parameter that no rank has used
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    # Local tensors instead of DTensors: all modes run the same kernels, with one call each.
    held = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    factor = torch.where(total > 0, rank_info.world_size / total, 1.0).to(held[0].device)
    squares = torch.stack(torch._foreach_norm(held)).square().sum()
    if rank_info.mesh is not None:
        # Replicas have equal shards, of which each counts once.
        dist.all_reduce(squares, group=rank_info.mesh.get_group("shard"))
    norm = squares.sqrt() * factor
    if grad_clip > 0:
        factor = factor * (grad_clip / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(held, factor)
    return norm


class Buffers:
    """The buffers of a module, which forward passes change; `shared`: all ranks take those of rank 0."""

    def __init__(self, module: nn.Module, *, shared: bool = False) -> None:
        self._buffers = list(module.buffers())
        self._shared = shared and bool(self._buffers)
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the values, before a step."""
        self._kept = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the last copy: the step is skipped."""
        for buffer, before in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        """Take the values of rank 0, if they are shared; collective."""
        if not self._shared:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in self._buffers])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [buffer.numel() for buffer in self._buffers])
        for buffer, values in zip(self._buffers, parts, strict=True):
            buffer.copy_(values.view_as(buffer))


def shared_statistics(module: nn.Module, rank_info: RankInfo, *, sync: bool, accepted: bool) -> nn.Module:
    """Convert the BatchNorm layers of a module, if any, to compute their statistics over all ranks.

    Without this, each rank would normalise with the statistics of its own samples and save them, because
    buffers are not broadcast. With --parallel.broadcast-buffers (`accepted`) there is no conversion.
    UsageError: the module has BatchNorm layers, and `sync` is False or the device is not a GPU.
    """
    norms = nn.modules.batchnorm._BatchNorm
    layers = [name for name, part in module.named_modules() if isinstance(part, norms)]
    if not layers or rank_info.world_size == 1 or accepted:
        return module
    named = f"{layers[0]} and {len(layers) - 1} more layers" if len(layers) > 1 else layers[0]
    if not sync:
        raise UsageError(
            f"{named}: BatchNorm would normalise with other statistics on each of the {rank_info.world_size} "
            "ranks; pass --parallel.sync-batchnorm on GPUs, --parallel.broadcast-buffers to accept this and "
            "keep the statistics of rank 0, or build the model with another norm"
        )
    if rank_info.device.type != "cuda":
        raise UsageError(
            f"{named}: torch synchronises BatchNorm on GPUs only; drop --parallel.sync-batchnorm and train "
            "with --parallel.mode none or --parallel.broadcast-buffers, or build the model with another norm"
        )
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    return convert(module)
