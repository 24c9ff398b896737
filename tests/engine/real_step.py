"""Memory of real steps, measured by torch's profiler: the sum of all allocations and releases since the start."""

import gc
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sa1b.engine.config import build
from sa1b.engine.model import declared
from sa1b.engine.planner.fake_step import blank_batch
from sa1b.engine.ranks.parallel import mode_of, wrap
from sa1b.engine.settings import autocast, grad_scaler
from sa1b.engine.step.gradients import clear, finish, micro_batch
from sa1b.engine.step.optim import freeze, make_optimizer
from sa1b.recipes.presets import PRESETS, SamConfig
from tests.engine.launch import group

MICRO_BATCH, MICRO_BATCHES = 2, 2


def settings(world_size: int, **parallel: Any) -> SamConfig:
    """Preset tiny at 128 pixels, with two micro-batches of two images on each rank."""
    tiny = PRESETS["tiny"]
    return replace(
        tiny,
        model=replace(tiny.model, image_size=128),
        data=replace(
            tiny.data, global_batch=MICRO_BATCH * MICRO_BATCHES * world_size, micro_batch=MICRO_BATCH, masks=8
        ),
        parallel=replace(tiny.parallel, device="cpu", **parallel),
    )


def peak_of(config: SamConfig) -> int:
    """Largest number of bytes of the CPU allocator in two steps of this rank; the batch counts once."""
    torch.set_num_threads(1)  # each further thread of a kernel has a buffer, which a GPU does not have
    gc.collect()  # modules of an earlier call: their release would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(config)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def peaks_of(configs: list[SamConfig]) -> list[int]:
    return [peak_of(config) for config in configs]


def _steps(config: SamConfig) -> None:
    parallel, data = config.parallel, config.data
    with group(parallel) as rank_info:
        module = build(config, None)
        freeze(module, config.optim)
        module = wrap(module, parallel, rank_info)
        module.train()
        optimizer = make_optimizer(module, config.optim, data.global_batch, mode_of(parallel).optimizer)
        scaler = grad_scaler(parallel.precision, rank_info.device)
        batch = blank_batch(MICRO_BATCH, data.masks, config.image_size, config.image_size // 4)
        for _ in range(2):
            for number in range(MICRO_BATCHES):
                with micro_batch(module, last=number + 1 == MICRO_BATCHES):
                    with autocast(parallel.precision, rank_info.device):
                        sums = module(*declared(module).inputs(batch, config.seed))
                    torch.autograd.backward(scaler.scale(sums["loss"]))
                count = sums["count"].detach()
                del sums
            finish(module, optimizer, scaler, count, rank_info, grad_clip=1.0)
            scaler.step(optimizer)
            scaler.update()
            clear(module, optimizer)
