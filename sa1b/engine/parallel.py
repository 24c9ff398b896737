"""Parallel training: a single process, DDP, FSDP2, or a pipeline, selected by one flag.

    rank_info = start(config)                                  # device first, then the process group
    freeze(module, optim)                                  # sa1b.engine.optim: before wrapping
    module = wrap(module, config, rank_info)                   # checks that all ranks built the same model
    optimizer = make_optimizer(module, optim, batch)
    scaler = grad_scaler(config.precision, rank_info.device)   # sa1b.engine.gradients
    ...load a checkpoint...; agree(module, rank_info)          # sa1b.engine.ranks
    warm_up(module, one_forward_and_backward)                # sa1b.engine.gradients: fresh and resumed alike
    set_timeout(rank_info, config.timeout)                     # from now on, a lost rank is detected quickly
    for step in ...:
        set_lr(optimizer, lr_at(optim, batch, step))
        for number, inputs in enumerate(micro_batches):
            with micro_batch(module, last=number + 1 == len(micro_batches)):
                with autocast(config.precision, rank_info.device):
                    sums = module(*inputs)
                scaler.scale(sums["loss"]).backward()
            count += sums["count"]
        norm = finish(module, optimizer, scaler, count, rank_info, grad_clip=optim.grad_clip)
        scaler.step(optimizer), scaler.update(), clear(module, optimizer)
    stop()

The gradient is the same in all modes, for any number of ranks and micro-batches.
"""

import os
import socket
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from sa1b.console import counted
from sa1b.engine.compression import compress_reduction, compression_rank
from sa1b.engine.gradients import Precision, autocast, compute_dtype, set_float32, shared_statistics
from sa1b.engine.network import Network
from sa1b.engine.pipeline import Pipeline, Schedule, divide
from sa1b.engine.rank_store import fresh_store
from sa1b.engine.ranks import RankInfo, agree
from sa1b.engine.sharding import least_size, mesh_of, replicas_note, replicas_on, shard_module
from sa1b.errors import UsageError
from sa1b.stream.plan import process_rank


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks, devices and precision.

    Attributes:
        mode: none: one process. ddp: every rank has the complete model. zero1: as ddp, but each rank keeps
            and updates a share of the optimizer state (ZeRO-1). fsdp: ranks have shards of the model,
            gradients and optimizer state. pipeline: each rank has some of the encoder blocks, the last one
            also the decoder; every rank reads all images of a step, and micro-batches pass through all ranks.
        precision: Number format of the matrix products; weights and optimizer are always float32.
        device: auto: the GPU of this rank if there is one, else the CPU.
        shard: For fsdp. full: shard parameters too. grad_op: shard gradients and optimizer only; parameters
            stay gathered between forward and backward.
        replicas: For fsdp: copies of the model; each is sharded over world size / replicas ranks, at least
            two. If this number does not fit, as after the loss of a machine, the largest smaller divisor of
            the world size is used, so that no rank holds more than replicas / world size of the model.
        offload: For fsdp: where shards and optimizer state are stored: on the device (none), in host
            memory (cpu), or in pinned host memory (pinned: faster copies, GPU only).
        wrap: For fsdp: parameters that are gathered together. block: those of an encoder block. size:100M:
            those of consecutive blocks, until there are at least 100 million parameters. none: the complete
            model, in float32.
        reduce: For fsdp: number format in which gradients are summed over the ranks. bf16 halves the sent
            bytes and rounds the gradient.
        schedule: For pipeline: order of the micro-batches' forward and backward passes. 1f1b: a backward pass
            as soon as possible, which keeps fewer activations; needs a micro-batch for each rank. gpipe: all
            forward passes first.
        shares: Shares of a step, one for each rank, such as 2,1,1 for a first rank that is twice as
            fast; --data.micro-batch is that of the largest share. By default all ranks have the same.
        compress: For ddp and zero1: how gradients are compressed while they are sent. fp16, bf16: rounded to
            these formats. powersgd:4: approximated by matrices of rank 4; the error is added to the next
            gradient. Not with --parallel.precision fp16, whose scale changes.
        compress_after: For powersgd: number of first steps without compression, about a tenth of the run.
        bucket: For ddp and zero1: MiB of gradients that are sent together.
        static_graph: For ddp and zero1: promise that every step runs the same graph, so that torch can
            optimise it.
        find_unused: For ddp and zero1: search the graph of each step for parameters without a gradient, for
            models with a branch that only some steps use. SAM has none.
        broadcast_buffers: For ddp and zero1: after each step, all ranks take the buffers of rank 0, such as
            the statistics of BatchNorm layers. Each rank normalises with its own images.
        timeout_first: Seconds that a rank waits for the others until the first step is done, which includes
            reading, compiling and connecting.
        timeout: Seconds that a rank waits for the others after the first step. It must
            exceed --data.deadline: while the storage of one rank is down, that rank retries and the others
            wait for it.
        sync_batchnorm: Compute the statistics of BatchNorm layers over all ranks; GPUs only.
        network: Network between the machines; --dry-run prints the variables of NCCL and gloo that are set,
            and why. Variables that are set already are kept. auto: infiniband if a port is active, else
            ethernet.
    """

    mode: Literal["none", "ddp", "zero1", "fsdp", "pipeline"] = "none"
    precision: Precision = "fp32"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    shard: Literal["full", "grad_op"] = "full"
    replicas: int = 1
    offload: Literal["none", "cpu", "pinned"] = "none"
    wrap: Annotated[str, tyro.conf.arg(metavar="block|size:NUMBER|none")] = "block"
    reduce: Literal["fp32", "bf16"] = "fp32"
    schedule: Schedule = "1f1b"
    shares: Annotated[str | None, tyro.conf.arg(metavar="NUMBER,...")] = None
    compress: str = "none"
    compress_after: int = 1000
    bucket: int = 25
    static_graph: bool = False
    find_unused: bool = False
    broadcast_buffers: bool = False
    timeout_first: float = 1800.0
    timeout: float = 600.0
    sync_batchnorm: bool = False
    network: Network = "auto"

    @property
    def divides_steps(self) -> bool:
        """Whether the ranks divide the images of a step; in a pipeline, every rank reads all of them."""
        return self.mode != "pipeline"


def start(config: ParallelConfig) -> RankInfo:
    """Take this process's device and join the other ranks.

    Under torchrun, rank and world size come from its environment variables. Without torchrun, the process is
    rank 0 of 1; ddp and fsdp then create a group of one. An existing group, as of Ray, gets our timeouts.

    Raises:
        UsageError: settings do not fit together or need a GPU; the message names the flag.
    """
    rank, world_size = process_rank()
    check_ranks(config, world_size)
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    device = _device(config, local_rank)
    if config.offload == "pinned" and device.type != "cuda":
        raise UsageError("--parallel.offload pinned: needs a GPU; pass --parallel.offload cpu or none")
    set_float32(config.precision, device)
    if config.mode == "none":
        return RankInfo(rank, world_size, local_rank, device, None)
    if not dist.is_initialized():
        # Checkpoints are saved from the CPU in parallel with training, so GPUs need gloo too.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=config.timeout_first)
        if world_size == 1:
            alone = HashStore()  # a group of one process needs no address and no port
            dist.init_process_group(
                backend, store=alone, rank=0, world_size=1, timeout=wait, device_id=_bound(device)
            )
        else:
            store = fresh_store(rank, world_size, wait)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=wait,
                device_id=_bound(device),
            )
            if device.type == "cuda":
                _refuse_shared_gpus(store, rank, world_size, device)
        _created.append(dist.group.WORLD)
    replicas = replicas_on(world_size, config.replicas)
    mesh = mesh_of(device, world_size, replicas) if config.mode == "fsdp" else None
    rank_info = RankInfo(rank, world_size, local_rank, device, mesh)
    if rank == 0:  # not to stdout, where --json prints the scores
        sys.stderr.write(replicas_note(world_size, config.replicas))
    set_timeout(rank_info, config.timeout_first)
    return rank_info


def stop() -> None:
    """Destroy the group if `start` created it. Do not call this after an error of one rank only."""
    if dist.is_initialized() and any(one is dist.group.WORLD for one in _created):
        dist.destroy_process_group()


# Groups of `start`, kept after their end. A DDP module that is freed as the last owner of its group ends
# gloo's threads while it holds the interpreter's lock, for which they may wait: a deadlock in 1 of 40 runs.
_created: list[object] = []


def set_timeout(rank_info: RankInfo, seconds: float) -> None:
    """Set the timeout of later collectives. Until then, the timeout is the long one for the first step.

    With gloo, a call that exceeds it raises RuntimeError. With NCCL, calls return at once, and torch's
    watchdog thread ends the process. Torch supports this for these two back ends only, by a private function.
    """
    if not dist.is_initialized():
        return
    for group in [None, *(rank_info.mesh.get_all_groups() if rank_info.mesh else [])]:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def wrap(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    """Move the module to its device and wrap it with DDP or FSDP; train and evaluate through the result.

    Args:
        module: a model (`sa1b.engine.model`). Frozen parameters have requires_grad False already.

    FSDP: see `sa1b.engine.sharding`. The number format of the products halves the sent bytes for 16-bit
    formats.

    DDP, with or without a sharded optimizer: gradients are views of the buckets, which saves a second copy.
    DDP does not broadcast buffers: they are constants, or equal on all ranks, as the statistics of
    `shared_statistics`; or `Buffers` of `sa1b.engine.gradients` shares them after each step.

    Pipeline: see `sa1b.engine.pipeline`.

    Raises:
        UsageError: see `shared_statistics` and `sa1b.engine.pipeline.divide`.
        DisagreementError: ranks have built different models; FSDP would mix them, and DDP would hide it.
    """
    agree(module, rank_info)
    if config.mode not in ("none", "pipeline"):
        sync, accepted = config.sync_batchnorm, config.broadcast_buffers
        module = shared_statistics(module, rank_info, sync=sync, accepted=accepted)
    return distribute(module, config, rank_info)


def distribute(module: nn.Module, config: ParallelConfig, rank_info: RankInfo) -> nn.Module:
    """The part of `wrap` after its checks, in which the ranks exchange no values."""
    if config.mode == "fsdp":
        return shard_module(
            module,
            rank_info.mesh,
            groups=config.wrap,
            reshard=config.shard == "full",
            offload=config.offload,
            compute=compute_dtype(config.precision),
            reduce={"fp32": torch.float32, "bf16": torch.bfloat16}[config.reduce],
        )
    if config.mode == "pipeline":
        stages = divide(module, rank_info.world_size)
        context = partial(autocast, config.precision, rank_info.device)
        return Pipeline(module, stages, rank_info, config.schedule, context)
    if any(one.device != rank_info.device for one in (*module.parameters(), *module.buffers())):
        module.to(rank_info.device)
    if config.mode == "none":
        return module
    # The gradient of a 1 x 1 convolution of channels-last pixels has other strides, but the same bytes.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    wrapped = DistributedDataParallel(
        module,
        init_sync=False,  # `agree` has compared the models
        device_ids=[rank_info.device.index] if rank_info.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket,
        gradient_as_bucket_view=True,
        static_graph=config.static_graph,
        find_unused_parameters=config.find_unused,
    )
    # The constructor argument of this name is deprecated, but its successor is missing before torch 2.13.
    wrapped.broadcast_buffers = False
    compress_reduction(wrapped, config.compress, config.compress_after)
    return wrapped


# Flags that have an effect in some modes only, with their defaults and these modes.
_FLAGS_OF_MODES = (
    ("shard", "full", ("fsdp",)),
    ("replicas", 1, ("fsdp",)),
    ("offload", "none", ("fsdp",)),
    ("wrap", "block", ("fsdp",)),
    ("reduce", "fp32", ("fsdp",)),
    ("static_graph", False, ("ddp", "zero1")),
    ("find_unused", False, ("ddp", "zero1")),
    ("broadcast_buffers", False, ("ddp", "zero1")),
    ("bucket", 25, ("ddp", "zero1")),
    ("compress", "none", ("ddp", "zero1")),
    ("compress_after", 1000, ("ddp", "zero1")),
    ("schedule", "1f1b", ("pipeline",)),
    ("shares", None, ("none", "ddp", "zero1", "fsdp")),
    ("sync_batchnorm", False, ("none", "ddp", "zero1", "fsdp")),
)


def check_ranks(config: ParallelConfig, world_size: int) -> None:
    """Refuse settings that do not fit together, or not this number of ranks.

    Raises:
        UsageError: the message names the flag.
    """
    if config.mode == "none" and world_size > 1:
        raise UsageError(
            f"--parallel.mode none: is for one process, this run has {world_size}; "
            "pass --parallel.mode ddp, zero1, fsdp or pipeline"
        )
    for flag, default, modes in _FLAGS_OF_MODES:
        if config.mode not in modes and getattr(config, flag) != default:
            raise UsageError(
                f"--parallel.{flag.replace('_', '-')}: is for --parallel.mode {' or '.join(modes)}, not "
                f"{config.mode}; drop one"
            )
    if config.mode == "pipeline" and config.precision == "fp16":
        raise UsageError(
            "--parallel.precision fp16: does not fit --parallel.mode pipeline, whose stages would detect "
            "different overflows; pass --parallel.precision bf16"
        )
    rank_shares(config, world_size)
    least_size(config.wrap)
    if compression_rank(config.compress) is not None and config.precision == "fp16":
        raise UsageError(
            f"--parallel.compress {config.compress}: does not fit --parallel.precision fp16, whose scale "
            "changes between a gradient and its correction; pass --parallel.precision bf16"
        )
    for one, other in (("static_graph", "find_unused"), ("sync_batchnorm", "broadcast_buffers")):
        if getattr(config, one) and getattr(config, other):
            names = [f"--parallel.{flag.replace('_', '-')}" for flag in (one, other)]
            raise UsageError(f"{', '.join(names)}: exclude each other; drop one")
    if config.compress_after < 0:
        raise UsageError(f"--parallel.compress-after {config.compress_after}: must not be negative")
    if config.compress_after != 1000 and compression_rank(config.compress) is None:
        raise UsageError(
            f"--parallel.compress-after: is for --parallel.compress powersgd, not {config.compress}; drop it"
        )
    if config.bucket < 1:
        raise UsageError(f"--parallel.bucket {config.bucket}: must be at least 1 MiB")
    if config.replicas < 1:
        raise UsageError(f"--parallel.replicas {config.replicas}: must be at least 1")
    for flag in ("timeout_first", "timeout"):
        if not getattr(config, flag) > 0:
            raise UsageError(
                f"--parallel.{flag.replace('_', '-')} {getattr(config, flag)}: must be more than 0 seconds"
            )


def rank_shares(config: ParallelConfig, world_size: int) -> tuple[int, ...] | None:
    """The numbers of --parallel.shares; None: all ranks have the same share.

    Raises:
        UsageError: the flag has another form, or another number of shares.
    """
    if config.shares is None:
        return None
    words = config.shares.split(",")
    if len(words) != world_size or not all(word.isdecimal() and int(word) for word in words):
        ranks = counted(world_size, "rank")
        raise UsageError(
            f"--parallel.shares {config.shares}: does not fit {ranks}; pass a positive whole number for each "
            "rank, with commas between them, such as 2,1,1"
        )
    return tuple(map(int, words))


def _device(config: ParallelConfig, local_rank: int) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--parallel.device cuda: torch finds no GPU; pass --parallel.device cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
    index = 0 if visible == 1 else local_rank
    if index >= visible:
        raise UsageError(
            f"local rank {local_rank}: no GPU is left for it, this process sees {visible}; "
            "start fewer processes on this machine, or pass --parallel.device cpu"
        )
    # The device is set first, so that allocations on "the current device" are not made on the first GPU.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _bound(device: torch.device) -> torch.device | None:
    """The device on which NCCL connects immediately, and for collectives that name no device."""
    return device if device.type == "cuda" else None


def _refuse_shared_gpus(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Raise UsageError if two ranks have the same GPU: NCCL would hang or fail without naming them."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"gpu/{rank}", own)
    for other in range(world_size):
        if other != rank and store.get(f"gpu/{other}").decode() == own:
            raise UsageError(
                f"ranks {min(rank, other)} and {max(rank, other)}: have the same GPU ({own}); start one "
                "process for each GPU, or let each task see its own (srun --gpus-per-task=1)"
            )
