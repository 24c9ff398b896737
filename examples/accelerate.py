"""Train a small SAM with accelerate, in one process or in several.

    python examples/accelerate.py shards --epochs 2
    accelerate launch --num_processes 2 examples/accelerate.py shards --epochs 2
    python examples/accelerate.py shards --epochs 4 --resume    # continues after the last epoch saved

Do not `prepare()` the loader: the stream gives each process its share, and accelerate would split it again.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

# Python must not search this folder: this file has the name of the package that it imports.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import torch

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe

with reported("examples"):
    from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all processes")
    parser.add_argument("--image-size", type=int, default=256, help="pixels of the padded square")
    parser.add_argument("--out", default="runs/accelerate", help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    args = parser.parse_args()
    if args.resume and not Path(args.out).is_dir():
        parser.error(f"--resume: {args.out} has no checkpoint; check --out")

    accelerator = Accelerator()  # starts the process group, from which the stream takes rank and world size
    stream = sa1b.Stream(
        args.root, global_batch=args.batch, image_size=args.image_size, masks=8, flip=0.5, seed=0
    )
    loader = sa1b.Loader(stream, device=accelerator.device, dense=args.image_size // 4, quiet=True)

    torch.manual_seed(0)
    interactive = Interactive(
        Sam(replace(PRESETS["tiny"], image_size=args.image_size)), Recipe(clicks=1, unprompted=0)
    )
    model, optimizer = accelerator.prepare(interactive, torch.optim.AdamW(interactive.parameters(), 1e-3))
    accelerator.register_for_checkpointing(loader)  # its position
    if args.resume:
        accelerator.load_state(args.out)

    first = stream.position // len(stream.view)
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        totals = torch.zeros(3, device=accelerator.device)  # images, loss, masks
        for batch in loader:
            sums = model(*interactive.inputs(batch, seed=0))
            # The mean over the masks of all processes: DDP divides the gradients by their number.
            masks = accelerator.reduce(sums["count"].detach(), "sum").clamp(min=1)
            accelerator.backward(sums["loss"] * accelerator.num_processes / masks)
            optimizer.step()
            optimizer.zero_grad()
            totals += torch.stack((totals.new_tensor(len(batch)), sums["loss"].detach(), sums["count"]))
        images, loss, count = accelerator.reduce(totals, "sum").tolist()
        accelerator.print(f"epoch {epoch}: {images:.0f} images, loss {loss / max(count, 1):.3f}")
        accelerator.save_state(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    with reported():
        main()
