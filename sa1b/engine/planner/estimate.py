"""Estimates for --dry-run: operations, memory and time of a step; and whether a step fits its device."""

import os
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sa1b.console import counted
from sa1b.engine.config import Config, build, has_checkpoints, initial_weights, with_steps
from sa1b.engine.data_config import available_memory
from sa1b.engine.evaluation import held_out_feed
from sa1b.engine.model import declared
from sa1b.engine.planner.fake_step import PURPOSES, StepMemory, measure
from sa1b.engine.ranks.network import NetworkChoice
from sa1b.engine.ranks.parallel import mode_of, rank_shares
from sa1b.engine.ranks.process_group import stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.optim import freeze, lr_line
from sa1b.engine.watch.hardware import peak_seconds
from sa1b.engine.weights import load_weights
from sa1b.errors import UsageError
from sa1b.report import rounded

_MEASURED = 2e11  # operations of a micro-batch, above which a CPU computes it for longer than `measure` takes
# Part of the measured activations that a GPU has at least: an H100 had 0.78 with the fused kernels.
_LEAST_ON_GPU = 2 / 3
_REFUSED = "refused"


def dry_run(config: Config, rank_info: RankInfo, connection: NetworkChoice) -> None:
    """Print the estimates of a run, and destroy the process group; see `plan` and `print_memory`."""
    plan(config, rank_info, connection)
    stop()
    print_memory(config, rank_info)


def plan(config: Config, rank_info: RankInfo, connection: NetworkChoice) -> None:
    """Open the data and the initial weights, and print the estimates of a run."""
    shares = rank_shares(config.parallel, rank_info.world_size)
    config.micro_batches(rank_info.world_size)  # refuses those that do not fit
    feed = Feed(
        config.data,
        config.image_size,
        rank_info,
        config.folder,
        config.seed,
        shares=shares,
        divided=mode_of(config.parallel).divides_steps,
    )
    config = with_steps(config, feed.images)
    held_out_feed(config, rank_info, feed.stream)
    with torch.device("meta"):
        module = build(config, None)
    freeze(module, config.optim)
    if rank_info.rank == 0:
        if (weights := initial_weights(config)) is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
                load_weights(declared(module), weights, config.scratch)
        print(describe(config, rank_info, module, feed.micro_batches, feed.images))
        print(lr_line(config.optim, config.data.global_batch))
        print(connection)


def print_memory(config: Config, rank_info: RankInfo) -> None:
    """Measure the memory of a step (`fake_step.py`) and print it on rank 0, without a process group."""
    # A model whose shapes depend on values cannot run on fake tensors. The line then states this.
    if rank_info.rank > 0:
        return
    if not mode_of(config.parallel).divides_steps:
        print("peak memory   not measured: the stages of a pipeline need unequal memory")
        return
    try:
        memory = measure(config, rank_info.world_size)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        print(f"peak memory   not measured: {type(error).__name__}: {reason}")
        return
    parts = {name: getattr(memory, name) for name in PURPOSES}
    listed = ", ".join(f"{name} {rounded(size / 1e9)}" for name, size in parts.items())
    hosted = f" ({rounded(memory.offloaded / 1e9)} GB of them in host memory)" if memory.offloaded else ""
    print(
        f"peak memory   {rounded(memory.peak / 1e9)} GB a rank for tensors, measured on tensors without "
        f"contents: {listed}{hosted}"
    )
    kind, why = _verdict(config, memory, rank_info)
    if kind:
        print(f"{kind:<14}{why}")


def check_memory(config: Config, module: nn.Module, rank_info: RankInfo) -> None:
    """Refuse a step that takes more memory than is free, on all ranks together; collective. Linux would end
    ranks on a CPU without a message, and a GPU would fail in the first step. Rank 0 measures a large step;
    others fit. UsageError: needed and available bytes.
    """
    # A run that resumes on a GPU fitted before, and a restart after a failure should not wait for the check.
    resumes = rank_info.device.type == "cuda" and has_checkpoints(config)
    images = config.micro_batches(rank_info.world_size)[0]
    small = declared(module).flops(images, images * config.data.masks) < _MEASURED
    if small or resumes or not mode_of(config.parallel).divides_steps:
        return
    shared: list[Any] = [_share(config, rank_info) if rank_info.rank == 0 else None]
    several = rank_info.world_size > 1
    if several:
        dist.broadcast_object_list(shared, src=0)
    if shared[0] is None:  # it cannot be measured
        return
    verdicts = [_verdict(config, shared[0], rank_info)] * rank_info.world_size
    if several:
        dist.all_gather_object(verdicts, verdicts[0])
    for kind, why in sorted(verdicts):
        if kind == _REFUSED:
            raise UsageError(why)
        if kind and rank_info.rank == 0:
            sys.stderr.write(f"{kind}: {why}\n")
            break


def _share(config: Config, rank_info: RankInfo) -> StepMemory | None:
    """The least memory of a rank's step, with a process group or without; None: it cannot be measured.
    Measured for one process; parts that ranks share are divided. For none and ddp, this is all of it.
    """
    images, mode = config.micro_batches(rank_info.world_size)[0], config.parallel.mode
    if rank_info.world_size > 1 or mode != "none":
        # The second micro-batch: the gradients exist from the beginning of a step, as in DDP's buckets.
        data = replace(config.data, global_batch=2 * images, micro_batch=images, block_size=1)
        alone = replace(config, data=data, parallel=ParallelConfig(precision=config.parallel.precision))
    else:
        alone = config
    try:
        memory = measure(alone, 1)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    shards = rank_info.shards
    parameters, gradients = memory.parameters // shards, memory.gradients // shards
    optimizer = memory.optimizer // (rank_info.world_size if mode == "zero1" else shards)
    hosted = parameters + gradients + optimizer if config.parallel.offload != "none" else 0
    return replace(memory, parameters=parameters, gradients=gradients, optimizer=optimizer, offloaded=hosted)


def _verdict(config: Config, memory: StepMemory, rank_info: RankInfo) -> tuple[str, str]:
    """`refused` and why a step does not fit the free memory of its device; or `warning` and why it may not;
    or two empty strings.
    """
    if rank_info.device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free, where = available_memory() / here, f" for each of {here} ranks" if here > 1 else ""
        why = _excess(
            config, memory, rank_info.world_size, free=free, where=f"available{where}", way="train on a GPU"
        )
        return (_REFUSED, why) if why else ("", "")
    free = torch.cuda.mem_get_info(rank_info.device)[0]
    place, way = f"free on {rank_info.device}", "--parallel.mode fsdp"
    least = replace(memory, activations=int(memory.activations * _LEAST_ON_GPU))
    for kind, needed in ((_REFUSED, least), ("warning", memory)):
        if why := _excess(config, needed, rank_info.world_size, free=free, where=place, way=way):
            return kind, why
    return "", ""


def _excess(config: Config, memory: StepMemory, ranks: int, free: float, where: str, way: str) -> str:
    """Why a rank's step does not fit its free bytes; empty if it fits."""
    need, data = memory.peak, config.data
    if need <= free:
        return ""
    images = config.micro_batches(ranks)[0]
    each = (memory.batches + memory.activations) / images
    fitting = int((free - need) / each + images)  # images of a micro-batch
    flag = "--data.global-batch" if data.micro_batch is None else "--data.micro-batch"
    smaller = f"--data.micro-batch {1 << fitting.bit_length() - 1}" if fitting > 0 else "a smaller model"
    return (
        f"{flag} {data.micro_batch or data.global_batch}: a micro-batch of {counted(images, 'image')} needs "
        f"{need:,} bytes, and {free:,.0f} are {where}; pass {smaller}, or {way}"
    )


def describe(config: Config, rank_info: RankInfo, module: nn.Module, micro_batches: int, images: int) -> str:
    """The output of --dry-run, for a model on any device and the micro-batches of a rank in a step."""
    data, model = config.data, declared(module)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    batch = data.global_batch
    staged = not mode_of(config.parallel).divides_steps
    share = batch if staged else -(-batch // rank_info.world_size)
    micro = min(data.micro_batch or share, share)
    of_rank = (
        f"{counted(rank_info.world_size, 'rank')} x {counted(micro_batches, 'micro-batch', 'es')} of up to"
    )
    if staged:
        stages = counted(rank_info.world_size, "stage")
        of_rank = f"{counted(micro_batches, 'micro-batch', 'es')} through {stages}, each of"
    flops = model.flops(batch, batch * data.masks)
    ideal = peak_seconds(model, batch, batch * data.masks, config.parallel.precision, rank_info)
    seconds = "no estimate of the time: the peak of this device is not known"
    if ideal is not None:
        seconds = f"{ideal:.2f} s at the GPUs' peak, of which 40 % is good"
    return "\n".join(
        [
            f"ranks         {rank_info.world_size} x {rank_info.device.type}, mode {config.parallel.mode}, "
            f"precision {config.parallel.precision}",
            f"batch         {counted(batch, 'image')} = {of_rank} {micro}",
            f"run           {counted(config.optim.steps, 'step')} = "
            f"{rounded(config.optim.steps * batch / images)} epochs of {counted(images, 'image')}",
            f"model         {parameters / 1e6:.1f} M parameters at {config.image_size} x {config.image_size}",
            f"step          {rounded(flops / 1e12)} TFLOP for up to {data.masks} masks an image; {seconds}",
        ]
    )
