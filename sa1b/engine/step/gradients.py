"""The gradient of a global batch, accumulated over micro-batches and ranks.

Ranks and micro-batches have different numbers of masks. So sums are back-propagated, and the gradients are
divided once by the masks of the global batch. DDP and FSDP average, so the factor is world size / masks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sa1b.engine.config import Config
from sa1b.engine.model import by_source, declared, worst_image
from sa1b.engine.precision import autocast, grad_scaler
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.optim import freeze, make_optimizer
from sa1b.hashing import Purpose, random_word
from sa1b.stream.batch import Batch


@contextmanager
def micro_batch(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Context for forward and backward of one micro-batch: only the last one of a step reduces gradients."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def seed_generators(seed: int, step: int, rank: int, number: int) -> None:
    """Seed torch's generators before the forward pass of a micro-batch, for models with dropout."""
    torch.manual_seed(random_word(seed, Purpose.GENERATOR, step, rank, number) >> 1)


def warm_up(module: nn.Module, run: Callable[[], object]) -> None:
    """Run a forward and backward pass, and no step, before the first step, and restore all state."""
    # In its first backward pass (with a static graph, its second), DDP rebuilds its buckets, and with three
    # or more ranks then sums in another order: the first step after a resume would differ in its last bits.
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
    # DDP's gradients are views of its buckets and are set to zero in place. Others would be stored twice, and
    # DDP would round them differently: it divides a view by the number of ranks, and multiplies them.
    owner.zero_grad(set_to_none=not isinstance(module, DistributedDataParallel))


def loss_divisor(expected: int) -> float:
    """The divisor of losses before the backward pass: about the largest possible count over all ranks."""
    # Sums of thousands of masks would overflow float16; a power of two changes no rounding elsewhere.
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
    """Turn sums into the gradient of the global batch, clip it, and return its norm before; collective."""
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
        self._buffers, self._shared = list(module.buffers()), shared
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        self._kept = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, before in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        if self._shared:
            _sync_params_and_buffers(_get_default_group(), self._buffers, 1 << 28, 0)


class TrainStep:
    """A new model, which is frozen and distributed here, and its optimizer; `sources`: of a mixture."""

    def __init__(
        self, module: nn.Module, config: Config, rank_info: RankInfo, sources: Sequence[str] = ()
    ) -> None:
        self.config, self.rank_info, self.sources = config, rank_info, sources
        freeze(module, config.optim)
        self.module = wrap(module, config.parallel, rank_info)
        self.model = declared(self.module)
        batch = config.data.global_batch
        self.optimizer = make_optimizer(self.module, config.optim, batch)
        self.scaler = grad_scaler(config.parallel.precision, rank_info.device)
        self.divisor = loss_divisor(batch * max(config.data.masks, 1))
        self._images: list[tuple[Tensor, Tensor, Tensor]] = []  # of a step, see `worst_image`

    def forward_backward(self, batch: Batch, step: int = 0, number: int = 1) -> dict[str, Tensor]:
        """Add the gradient of micro-batch `number`, from 1; return the model's sums without gradient."""
        config, kinds = self.config, getattr(self.model, "image_figures", ())
        seed_generators(config.seed, step, self.rank_info.rank, number)
        inputs, precision = self.model.inputs(batch, config.seed), config.parallel.precision
        with autocast(precision, self.rank_info.device):
            sums: dict[str, Tensor] = self.module(*inputs)
        torch.autograd.backward(self.scaler.scale(sums["loss"] / self.divisor))
        sums = {name: value.detach() for name, value in sums.items()}
        totals = {name: sums[name] for name in (*self.model.figures, "count")}
        self._images = [] if number == 1 else self._images
        if kinds and "of_images" in sums:
            self._images.append((sums["of_images"], batch.ids, batch.positions))
            if self.sources and batch.source_index is not None:
                totals |= by_source(sums["of_images"], batch.source_index, self.sources, kinds)
        return totals

    def finish(self, count: Tensor) -> Tensor:
        module, optimizer, clip = self.module, self.optimizer, self.config.optim.grad_clip
        return finish(module, optimizer, self.scaler, count / self.divisor, self.rank_info, grad_clip=clip)

    def worst(self) -> dict[str, Tensor]:
        return worst_image(self._images, getattr(self.model, "image_figures", ()))
