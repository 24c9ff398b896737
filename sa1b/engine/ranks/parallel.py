"""Parallel training: a single process, DDP or FSDP2, selected by one flag. The gradient is the same in all
modes, for any number of ranks and micro-batches.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.model import declared
from sa1b.engine.precision import compute_dtype
from sa1b.engine.ranks.agreement import agree_on_weights
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig, group_size
from sa1b.errors import UsageError
from sa1b.workers import memory_limit


def wrap(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    """Move the module to its device and distribute it; train and evaluate through the result."""
    agree_on_weights(module, rank_info)
    if config.mode != "none":
        module = shared_statistics(module, config, rank_info)
    if config.mode == "fsdp":
        return _fsdp(module, config, rank_info)
    if any(tensor.device != rank_info.device for tensor in (*module.parameters(), *module.buffers())):
        module.to(rank_info.device)
    return module if config.mode == "none" else _ddp(module, config, rank_info)


def _ddp(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    # The gradient of a 1 x 1 convolution of channels-last pixels has other strides, but the same bytes.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    wrapped = DistributedDataParallel(
        module,
        init_sync=False,  # `agree_on_weights` has compared them
        device_ids=[rank_info.device.index] if rank_info.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket,
        gradient_as_bucket_view=True,
        static_graph=config.static_graph,
        find_unused_parameters=config.find_unused,
    )
    # `gradients.Buffers` shares them. The constructor's argument is deprecated, its successor new in 2.13.
    wrapped.broadcast_buffers = False
    if config.compress == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if config.compress == "bf16":
        wrapped.register_comm_hook(None, _reduce_bf16)
    return wrapped


def _reduce_bf16(group: None, bucket: GradBucket) -> Future[Tensor]:
    """Torch's hook. Torch refuses it by its name where NCCL is missing, but gloo sums bf16 too."""
    assert dist.group.WORLD is not None
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


def _fsdp(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    # The units of the model are gathered in the format of the matrix products, all other parameters in
    # float32. Inputs are never cast, because they may be coordinates.
    # Torch warns of changes in place of a view that a unit returns; models add it to a residual.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kept = OffloadPolicy()
    if config.offload != "none":
        kept = CPUOffloadPolicy(pin_memory=config.offload == "pinned")
    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.reduce]
    shard = partial(fully_shard, mesh=rank_info.mesh, offload_policy=kept)
    formats = MixedPrecisionPolicy(compute_dtype(config.precision), reduce, cast_forward_inputs=False)
    for group in units(declared(module).fsdp_units(), config.wrap):
        members = [part for unit in group for part in unit]
        shard(members, reshard_after_forward=config.shard == "full", mp_policy=formats)
        if hasattr(group[0][0], "gathered"):
            _gather_group(group[0][0], group[-1][0])
    whole = MixedPrecisionPolicy(None, reduce, cast_forward_inputs=False)
    shard(module, reshard_after_forward=False, mp_policy=whole)
    return module


def available_memory() -> float:
    """Bytes that this process can still use, by the machine and its cgroups; infinite: not known."""
    free = math.inf
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(free, memory_limit())


def units(chain: list[list[nn.Module]], groups: str) -> list[list[list[nn.Module]]]:
    """Join consecutive units of a model, in the order of execution, to groups by --parallel.wrap."""
    least = group_size(groups)
    if least is None:
        return []
    joined: list[list[list[nn.Module]]] = []
    size = least
    for unit in chain:
        if size >= least:
            joined.append([])
            size = 0
        joined[-1].append(unit)
        size += sum(parameter.numel() for part in unit for parameter in part.parameters())
    return joined


def _gather_group(first: Any, last: Any) -> None:
    """Gather a group at the method `gathered` of its first unit, and release it after that of its last."""
    # Torch's function supports only one method, which must run the complete group.
    if first is last:
        register_fsdp_forward_method(first, "gathered")
        return
    begin, end, state = first.gathered, last.gathered, first._get_fsdp_state()

    def gather(*inputs: Any) -> Any:
        inputs, _ = state._pre_forward(first, inputs, {})
        return begin(*inputs)

    def release(*inputs: Any) -> Any:
        return state._post_forward(last, inputs, end(*inputs))

    first.gathered, last.gathered = gather, release


def shared_statistics(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    """Convert BatchNorm layers to compute their statistics over all ranks, or refuse those of each rank."""
    norms = nn.modules.batchnorm._BatchNorm
    layers = [name for name, part in module.named_modules() if isinstance(part, norms)]
    if not layers or rank_info.world_size == 1 or config.broadcast_buffers:
        return module
    if not config.sync_batchnorm:
        raise UsageError(
            f"{layers[0]}: BatchNorm would normalise with other statistics on each rank; pass "
            "--parallel.sync-batchnorm on GPUs, or --parallel.broadcast-buffers to keep those of rank 0"
        )
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    return convert(module)
