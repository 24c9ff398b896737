"""The gradient of a global batch, put together from micro-batches and ranks.

Losses are sums over masks, and ranks and micro-batches hold different numbers of masks: a mean of means would
weigh them wrongly. So the sums themselves are back-propagated, and the gradients are divided once by the
number of masks in the global batch. DDP and FSDP average over ranks, hence the factor world size / masks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sa1b.engine.place import Place


@contextmanager
def micro_batch(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: gradients travel between ranks at a step's last only.

    Until then each rank keeps whole gradients in float32, under FSDP too.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def prime(module: nn.Module, run: Callable[[], object]) -> None:
    """Run one forward and backward whose gradients are thrown away, before the first step of any run.

    DDP learns in its first backward in which order gradients come, and arranges its buckets anew. From three
    ranks on it then sums in another order: the step after a resume would differ in its last bits from the
    same step of an uninterrupted run. With this call each real step has the final buckets, in fresh and
    resumed runs alike. A static graph may not accumulate in its first backward, which is this one, too.

    Args:
        run: Forward and backward of one micro-batch, with the scaler's scale and autocast; the samples may be
            any. It must not step the optimizer.
    """
    with micro_batch(module, last=True):
        run()
    for parameter in module.parameters():
        parameter.grad = None


@torch.no_grad()
def finish(
    module: nn.Module, optimizer: Optimizer, scaler: GradScaler, count: Tensor, place: Place, *, clip: float
) -> Tensor:
    """Turn accumulated sums into the gradient of the global batch, and clip it; once, before the step.

    Collective: all ranks call it behind their last micro-batch. `scaler.step` and `scaler.update` follow.

    Args:
        count: masks in this rank's micro-batches (their weights' sum), one number, on the device. If no rank
            has one the gradients stay as they are: zero.
        clip: largest norm over all parameters and ranks; 0: no limit.

    Returns:
        The norm before clipping, float32, no dimensions, the same on all ranks, on the gradients' device.
        Nothing waits for it. Not finite: an overflow, which fp16's scaler skips; else the caller's to judge.
    """
    scaler.unscale_(optimizer)
    total = count.detach().float().clone()
    if place.world > 1:
        dist.all_reduce(total)
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    # Plain tensors: the same kernels in all modes, one call each.
    held = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]
    factor = torch.where(total > 0, place.world / total, 1.0).to(held[0].device)
    squares = torch.stack(torch._foreach_norm(held)).square().sum()
    if place.mesh is not None:
        # Replicas hold the same shards: each counts once.
        dist.all_reduce(squares, group=place.mesh.get_group("shard"))
    norm = squares.sqrt() * factor
    if clip > 0:
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(held, factor)
    return norm
