"""How many bytes does PowerSGD save on a slow network, and what does it do to the loss?

    torchrun --nproc_per_node=2 examples/distributed/powersgd.py shards --steps 20 --rank 4

A small SAM trains twice from the same weights on the same images: with gradients as they are, and with the
low-rank approximations of torch's hook for DDP. The error of an approximation is added to the next gradient.
The first steps (--after) are not compressed. Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization". On a network of 10 Gbit/s or more, a model of this kind trains
faster without it.
"""

import argparse
import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe


def trained(model: nn.Module, args: argparse.Namespace, low_rank: int) -> tuple[list[float], list[float]]:
    """The losses and the megabytes that a rank gives to the reduction, of each step; 0: not compressed."""
    ranks = dist.get_world_size()
    # One bucket: with several, the collectives of torch's hook start from callbacks, in an order that differs
    # between ranks under gloo.
    module = DistributedDataParallel(model, bucket_cap_mb=10_000)
    state = powersgd.PowerSGDState(
        dist.group.WORLD, low_rank or 1, start_powerSGD_iter=max(args.after, 2), random_seed=0
    )
    if low_rank:
        module.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    stream = sa1b.Stream(
        args.root, global_batch=args.batch, image_size=args.image_size, masks=8, epochs=None,
        rank=dist.get_rank(), world_size=ranks,
    )  # fmt: skip
    numbers = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    losses, megabytes, before = [], [], 0
    for step, batch in zip(
        range(args.steps), sa1b.Loader(stream, dense=args.image_size // 4, quiet=True), strict=False
    ):
        sums = module(*model.inputs(batch, seed=0))
        total = torch.stack((sums["loss"], sums["count"])).detach()
        dist.all_reduce(total)
        (sums["loss"] * ranks / total[1].clamp(min=1)).backward()  # DDP divides by the number of ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total[0] / total[1].clamp(min=1)))
        sent = state.total_numel_after_compression - before
        before += sent
        megabytes.append((sent if low_rank and step >= state.start_powerSGD_iter else numbers) * 4 / 1e6)
    return losses, megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=4, help="of the approximation (4)")
    parser.add_argument(
        "--after", type=int, default=2, help="steps before the first compressed one, at least 2 (2)"
    )
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all ranks (4)")
    parser.add_argument("--image-size", type=int, default=128, help="pixels of the padded square (128)")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # on GPUs: nccl, and a device for each rank
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sam = Sam(replace(PRESETS["tiny"], image_size=args.image_size))
    model = Interactive(sam, Recipe(clicks=1, unprompted=0))
    plain = trained(copy.deepcopy(model), args, 0)
    compressed = trained(model, args, args.rank)
    if dist.get_rank() == 0:
        print((__doc__ or "").splitlines()[0])
        print(f"step  loss without  with rank {args.rank}   MB without   with")
        for step, (loss, low, megabytes, less) in enumerate(
            zip(plain[0], compressed[0], plain[1], compressed[1], strict=True)
        ):
            print(f"{step + 1:4}  {loss:12.5f}  {low:11.5f}   {megabytes:10.3f}  {less:6.3f}")
        last = max(len(plain[0]) // 4, 1)
        means = [sum(losses[-last:]) / last for losses in (plain[0], compressed[0])]
        print(f"bytes of a compressed step: 1/{plain[1][-1] / compressed[1][-1]:.1f} of those without")
        print(f"mean loss of the last {last} steps: {means[0]:.5f} without, {means[1]:.5f} with")
    dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main()
