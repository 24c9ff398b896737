"""Buffers of a module that forward passes change, such as the statistics of BatchNorm layers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import UsageError


class Buffers:
    """The buffers of a module, such as the statistics of BatchNorm layers, which forward passes change.
    `shared`: after each step, all ranks take those of rank 0 (--parallel.broadcast-buffers).
    """

    def __init__(self, module: nn.Module, *, shared: bool = False) -> None:
        self._buffers = [one for one in module.buffers() if not one.is_meta]
        self._shared = shared and bool(self._buffers)
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the values, before a step."""
        self._kept = [one.clone() for one in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the last copy: the step is skipped."""
        for one, before in zip(self._buffers, self._kept, strict=True):
            one.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        """Take the values of rank 0, if they are shared; collective."""
        if not self._shared:
            return
        flat = torch.cat([one.reshape(-1).double() for one in self._buffers])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [one.numel() for one in self._buffers])
        for one, values in zip(self._buffers, parts, strict=True):
            one.copy_(values.view_as(one))


def shared_statistics(module: nn.Module, rank_info: RankInfo, *, sync: bool, accepted: bool) -> nn.Module:
    """Convert the BatchNorm layers of a module, if any, to compute their statistics over all ranks.

    Without this, each rank would normalise with the statistics of its own samples and save them, because
    buffers are not broadcast. With --parallel.broadcast-buffers (`accepted`) there is no conversion.
    UsageError: the module has BatchNorm layers, and `sync` is False or the device is not a GPU.
    """
    norms = nn.modules.batchnorm._BatchNorm
    found = [name for name, part in module.named_modules() if isinstance(part, norms)]
    if not found or rank_info.world_size == 1 or accepted:
        return module
    named = f"{found[0]} and {len(found) - 1} more layers" if len(found) > 1 else found[0]
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
