"""What does each stage of ZeRO save, and what does it cost?

    torchrun --nproc_per_node=2 examples/distributed/zero.py shards --steps 5

AdamW keeps two numbers beside each weight and its gradient: 16 bytes in float32. DDP keeps all of them on
every rank. ZeroRedundancyOptimizer divides the optimizer state over the ranks (ZeRO-1). FSDP2 divides
gradients and weights too: with grad_op it gathers the weights once a step (ZeRO-2), with full again in the
backward pass (ZeRO-3). The losses are equal. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models".
"""

import argparse
import copy
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe

MODES = {
    "ddp": "everything on every rank",
    "zero": "optimizer state divided (ZeroRedundancyOptimizer)",
    "grad_op": "and gradients, and weights between steps (FSDP2, gathered once a step)",
    "full": "the same, weights gathered twice a step (FSDP2)",
}


def wrapped(model: Interactive, mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if mode in ("ddp", "zero"):
        module: nn.Module = DistributedDataParallel(model)
        if mode == "ddp":
            return module, torch.optim.AdamW(module.parameters(), 1e-3)
        return module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    for block in model.weights().image_encoder.blocks:
        fully_shard(block, reshard_after_forward=mode == "full")
    fully_shard(model, reshard_after_forward=False)  # the other weights are small
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def megabytes(tensors: Iterable[Any]) -> float:
    """Of the parts that this rank keeps."""
    held = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.nbytes for each in held if isinstance(each, torch.Tensor)) / 1e6


def trained(
    model: Interactive, mode: str, args: argparse.Namespace
) -> tuple[list[float], list[float], float]:
    """The losses; megabytes of weights, gradients and optimizer state; seconds of a step."""
    module, optimizer = wrapped(model, mode)
    ranks = dist.get_world_size()
    stream = sa1b.Stream(
        args.root, global_batch=args.batch, image_size=args.image_size, masks=8, epochs=None,
        rank=dist.get_rank(), world_size=ranks,
    )  # fmt: skip
    losses, times, held = [], [], [0.0]
    for _, batch in zip(
        range(args.steps), sa1b.Loader(stream, dense=args.image_size // 4, quiet=True), strict=False
    ):
        start = time.perf_counter()
        sums = module(*model.inputs(batch, seed=0))
        total = torch.stack((sums["loss"], sums["count"])).detach()
        dist.all_reduce(total)
        (
            sums["loss"] * ranks / total[1].clamp(min=1)
        ).backward()  # DDP and FSDP divide by the number of ranks
        optimizer.step()
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        state = [tensor for each in inner.state.values() for tensor in each.values()]
        gradients = [each.grad for each in module.parameters()]
        held = [megabytes(tensors) for tensors in (module.parameters(), gradients, state)]
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        losses.append(float(total[0] / total[1].clamp(min=1)))
    return losses, held, sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all ranks (4)")
    parser.add_argument("--image-size", type=int, default=128, help="pixels of the padded square (128)")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # on GPUs: nccl, and a device for each rank
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Interactive(
        Sam(replace(PRESETS["tiny"], image_size=args.image_size)), Recipe(clicks=1, unprompted=0)
    )
    results = {mode: trained(copy.deepcopy(model), mode, args) for mode in MODES}
    if dist.get_rank() == 0:
        print((__doc__ or "").splitlines()[0])
        print(f"MB on each of {dist.get_world_size()} ranks")
        print(f"{'':8} weights gradients optimizer    sum  step, s  last loss")
        for mode, (losses, held, seconds) in results.items():
            kept = f"{held[0]:8.2f} {held[1]:9.2f} {held[2]:9.2f} {sum(held):6.2f}"
            print(f"{mode:8}{kept} {seconds:8.3f}  {losses[-1]:.6f}  {MODES[mode]}")
        losses = torch.tensor([losses for losses, *_ in results.values()])
        print(f"largest difference of a loss: {float((losses / losses[0] - 1).abs().max()):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main()
