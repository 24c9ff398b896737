"""How training scales: speed-up, efficiency and share of communication on 1, 2, 4, ... ranks.

    torchrun --nproc-per-node 8 -m benchmarks.scaling --preset vit_b --data.root shards --data.micro-batch 4

Start it on each of several nodes with torchrun's flags. Flags that are not below are those of `sa1b train`.

The first N ranks train; the others wait. Steps (forward, backward, gradient norm, optimizer with learning
rate 0; the same images in memory) are timed as in training, and without any exchange: DDP's `no_sync`; for
FSDP no reduction of gradients, and parameters that stay gathered. The difference is exposed communication,
which no computation overlaps. Each round measures each number of ranks; figures are medians of the rounds.
"""

import argparse
import gc
import sys
import time
from contextlib import closing
from copy import copy
from dataclasses import replace
from os import environ
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from sa1b.console import run_directly
from sa1b.engine.config import Config, build, parse
from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import TrainStep, clear, micro_batch
from sa1b.engine.step.optim import set_lr
from sa1b.recipes.presets import PRESETS
from sa1b.sam.kernel_proof import prove_for_run


def main() -> int:
    own = argparse.ArgumentParser("benchmarks.scaling", allow_abbrev=False)
    own.add_argument("--ranks", metavar="N,N,...", help="by default 1, 2, 4, ... and all")
    own.add_argument("--strong", type=int, help="images of a step; by default a micro-batch for each rank")
    own.add_argument("--steps", type=int, default=5, help="with and without exchange, in each of the rounds")
    own.add_argument("--rounds", type=int, default=3, help="figures are their medians")
    own.add_argument("--picture", type=Path, default="scaling.png")
    flags, words = own.parse_known_args()
    rank, every = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    config = parse(words, None, PRESETS, own.prog, world_size=every)
    size, powers = config.data.micro_batch or 1, {1 << n for n in range(every.bit_length())}
    counts = [*map(int, flags.ranks.split(","))] if flags.ranks else sorted({*powers, every})
    images = {count: flags.strong or count * size for count in counts}
    shared = not any(total % (count * size) for count, total in images.items())
    if max(counts) > every or not shared:
        own.error(f"{every} ranks cannot share {images} images by {size} in mode {config.parallel.mode}")
    times: dict[int, list[list[float]]] = {count: [] for count in counts}
    for count in flags.rounds * counts:
        if rank < count:
            environ["WORLD_SIZE"] = str(count)
            data = replace(config.data, global_batch=images[count], micro_batch=size)
            times[count].append(measure(replace(config, data=data), flags.steps))
            gc.collect()  # the model, before the next one is built
        if rank == 0:
            sys.stderr.write(f"{count} ranks: {times[count][-1][0]:.3g} s a step\n")
    if rank == 0:
        rows = compared(times, images)
        print("".join(f"{name:>15}" for name in rows[0]))
        print("\n".join("".join(f"{value:15,.4g}" for value in row.values()) for row in rows))
        draw(rows, f"{config.preset}, {config.parallel.mode}, {config.parallel.precision}", flags.picture)
    return 0


def measure(config: Config, steps: int) -> list[float]:
    """Seconds of a step and of one without exchange, on the slowest rank; each rank calls it."""
    rank_info = start(config.parallel)
    prove_for_run(config, rank_info.device, rank_info.local_rank)
    own = replace(config.data, global_batch=config.data.global_batch // rank_info.world_size)
    single = replace(rank_info, rank=0, world_size=1, mesh=None)
    with closing(Feed(own, config.image_size, single, config.folder, config.seed + rank_info.rank)) as feed:
        batches = list(feed.step())
    step = TrainStep(build(config, None), config, rank_info)
    set_lr(step.optimizer, 0.0)
    together = timed(step, step, batches, steps)
    alone = copy(step)
    alone.rank_info = single
    alone.module = nn.ParameterList(one for group in step.optimizer.param_groups for one in group["params"])
    for unit in step.module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False)
            unit.set_reshard_after_backward(False)
            unit.unshard()  # the last exchange
    slowest = torch.tensor([together, timed(step, alone, batches, steps)], device=rank_info.device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    stop()
    return slowest.tolist()


def timed(step: TrainStep, finishing: TrainStep, batches: list, steps: int) -> float:
    """Median seconds of a step; `finishing` is `step`, or its copy that exchanges nothing."""
    weights, gathered = list(finishing.module.parameters()), isinstance(step.module, FSDPModule)
    zeros = list(map(torch.zeros_like, weights)) if gathered and finishing is not step else []
    times = []
    for _ in range(steps + 1):
        began, masks = time.perf_counter(), torch.zeros((), device=step.rank_info.device)
        for number, batch in enumerate(batches, 1):
            with micro_batch(step.module, last=finishing is step and number == len(batches)):
                masks = masks + step.forward_backward(batch)["count"]
        for weight, zero in zip(weights, zeros, strict=False):
            weight.grad = zero  # the gradients are those of gathered parameters
        norm = finishing.finish(masks)
        step.scaler.step(step.optimizer)
        step.scaler.update()
        clear(step.module, step.optimizer)
        float(norm)  # waits for the device
        times.append(time.perf_counter() - began)
    return median(times[1:])


def compared(times: dict[int, list[list[float]]], images: dict[int, int]) -> list[dict[str, float]]:
    """The row of each number of ranks; the first has the efficiency 1."""
    rows: list[dict[str, float]] = []
    for ranks, rounds in times.items():
        step = median(one[0] for one in rounds)
        row = {"ranks": ranks, "images/step": images[ranks], "s/step": step, "images/s": images[ranks] / step}
        first = (rows or [row])[0]
        row["speed-up"] = row["images/s"] / first["images/s"] * first["ranks"]
        row["efficiency"] = row["speed-up"] / ranks
        row["communication"] = max(0.0, median(one[0] - one[1] for one in rounds) / step)
        rows.append(row)
    return rows


def draw(rows: list[dict[str, float]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    ranks, figure = [row["ranks"] for row in rows], Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    left.plot(ranks, ranks, "--", color="grey", label="ideal")
    for axes, names in (left, ["speed-up"]), (right, ["efficiency", "communication"]):
        for name in names:
            axes.plot(ranks, [row[name] for row in rows], "o-", label=name)
        axes.set(xlabel="ranks", xticks=ranks, ylim=(0, None))
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    run_directly(main)
