"""How do GPUs of different speed share a step, so that the gradient is still that of the whole batch?

    torchrun --nproc_per_node=2 examples/distributed/unequal_gpus.py shards --shares 2 1

A rank with share 2 takes the place of two ranks of the stream: it has two micro-batches of a step where the
other one has one. Losses are sums over masks, gradients are added over micro-batches and ranks, and divided
once by the number of masks in the whole batch. A mean over ranks would be wrong: ranks have different numbers
of masks. The program compares each gradient with that of one process which computes the whole batch alone.
"""

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe


def loader(args: argparse.Namespace, place: int, places: int) -> sa1b.Loader:
    """The micro-batches of one of `places` equal parts of each step."""
    stream = sa1b.Stream(
        args.root,
        global_batch=args.batch,
        image_size=args.image_size,
        masks=8,
        epochs=None,
        rank=place,
        world_size=places,
    )
    return sa1b.Loader(stream, dense=args.image_size // 4, threads=1, quiet=True)


def sums_of(model: Interactive, batches: Iterable[sa1b.Batch]) -> tuple[Tensor, Tensor, int]:
    """The summed gradient of some micro-batches, [loss, masks], and the number of images."""
    model.zero_grad()
    total, images = torch.zeros(2), 0
    for batch in batches:
        sums = model(*model.inputs(batch, seed=0))
        sums["loss"].backward()
        total += torch.stack((sums["loss"], sums["count"])).detach()
        images += len(batch.ids)
    gradients = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return torch.cat([gradient.flatten() for gradient in gradients]), total, images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[2, 1], help="micro-batches of each rank (2 1)"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=6, help="images of a step over all ranks (6)")
    parser.add_argument("--image-size", type=int, default=128, help="pixels of the padded square (128)")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # on GPUs: nccl, and a device for each rank
    rank, ranks, places = dist.get_rank(), dist.get_world_size(), sum(args.shares)
    if len(args.shares) != ranks:
        parser.error(f"--shares {args.shares}: needs one number for each of {ranks} ranks")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Interactive(
        Sam(replace(PRESETS["tiny"], image_size=args.image_size)), Recipe(clicks=1, unprompted=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    first = sum(args.shares[:rank])
    mine = [iter(loader(args, place, places)) for place in range(first, first + args.shares[rank])]
    alone = iter(loader(args, 0, 1))
    if rank == 0:
        print((__doc__ or "").splitlines()[0])
    for step in range(args.steps):
        start = time.perf_counter()
        gradient, total, images = sums_of(model, [next(each) for each in mine])
        seconds = time.perf_counter() - start
        whole, whole_total, _ = sums_of(model, [next(alone)])  # before the weights change
        dist.all_reduce(gradient)
        dist.all_reduce(total)
        gradient, whole = gradient / total[1].clamp(min=1), whole / whole_total[1].clamp(min=1)
        difference = float((gradient - whole).abs().max() / whole.abs().max())
        offset = 0
        for parameter in model.parameters():
            parameter.grad = gradient[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        optimizer.step()
        shown: list[tuple[int, float]] = [(0, 0.0)] * ranks
        dist.all_gather_object(shown, (images, seconds))
        if rank == 0:
            each = ", ".join(
                f"rank {number}: {count} images in {took:.2f} s" for number, (count, took) in enumerate(shown)
            )
            loss = float(total[0] / total[1].clamp(min=1))
            print(f"step {step + 1}: loss {loss:.6f}; {each}; gradient within {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main()
