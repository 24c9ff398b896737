"""Train a small SAM with Lightning, with validation on a held-out view after every epoch.

    sa1b view shards --held-out 20% --name train
    sa1b view shards --held-out 20% --split held-out --name held-out
    python examples/lightning.py shards --epochs 3
    python examples/lightning.py shards --epochs 3 --devices 2 --strategy ddp       # or fsdp
    python examples/lightning.py shards --epochs 5 --resume runs/lightning/last.ckpt

The first two commands make the views. A checkpoint is written after every step, and a run resumes exactly
after it, with any number of devices. The losses are those of `sa1b train` with the same settings.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

# Python must not search this folder: this file has the name of the package that it imports.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import torch
from torch import Tensor, optim
from torch.distributed.fsdp import fully_shard

import sa1b
from sa1b.console import reported
from sa1b.recipes.presets import PRESETS
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam

with reported("examples"):
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from sa1b.stream.lightning import TrainingData


class Training(lightning.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.root, self.size = args.root, args.image_size
        torch.manual_seed(0)  # the same weights on all ranks
        tiny = PRESETS["tiny"]
        self.sam = Interactive(Sam(replace(tiny.model, image_size=args.image_size)), tiny.recipe)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.sam, mesh=self.device_mesh["data_parallel"])

    def loader(self, view: str, **options: object) -> sa1b.Loader:
        stream = sa1b.Stream(self.root, view=view, global_batch=4, image_size=self.size, masks=8, **options)
        return sa1b.Loader(stream, device=self.device, dense=self.size // 4, quiet=True)

    def val_dataloader(self) -> sa1b.Loader:
        return self.loader("held-out", order="sequential")  # each iteration is every image once

    def training_step(self, batch: sa1b.Batch, index: int) -> Tensor:
        sums = self.sam(*self.sam.inputs(batch, seed=0))
        total, masks = self._of_all_ranks(sums["loss"]), self._of_all_ranks(sums["count"]).clamp(min=1)
        self.print(f"step {self.global_step + 1}: loss {total / masks:.6f}")
        # The mean over the masks of all ranks: DDP and FSDP divide the gradients by the number of ranks.
        return sums["loss"] * self.trainer.world_size / masks

    def _of_all_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value.detach().clone(), reduce_op="sum")

    def validation_step(self, batch: sa1b.Batch, index: int) -> None:
        inputs = self.sam.inputs(batch, seed=0)
        found = self.sam(*inputs, evaluate=True)  # after 1, 3 and 5 clicks and for the box
        iou = (found["intersections"] / found["unions"].clamp(min=1))[inputs[1].weights > 0, 0]
        self.log("iou", iou.sum() / max(len(iou), 1), True, batch_size=max(len(iou), 1), sync_dist=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW(self.parameters(), 1e-3, weight_decay=0)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("root", help="folder that sa1b reshard made, with the views train and held-out")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--image-size", type=int, default=256, help="pixels of the padded square")
parser.add_argument("--steps", type=int, default=-1, help="stop after as many steps, also within an epoch")
parser.add_argument("--devices", type=int, default=1, help="processes, each with a GPU if there are any")
parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp"], default="auto", help="fsdp: FSDP2")
parser.add_argument("--resume", help="checkpoint; the position of the stream is in it")

if __name__ == "__main__":
    args = parser.parse_args()
    sharded = ModelParallelStrategy(data_parallel_size=args.devices, tensor_parallel_size=1)
    strategy = sharded if args.strategy == "fsdp" else args.strategy
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        "runs/lightning", every_n_train_steps=1, save_last=True
    )
    model = Training(args)
    data = TrainingData(lambda: model.loader("train", flip=0.5))  # its position is part of each checkpoint
    options = {"use_distributed_sampler": False, "logger": False}  # the stream divides the data over ranks
    trainer = lightning.Trainer(
        max_epochs=args.epochs, max_steps=args.steps, devices=args.devices, strategy=strategy,
        callbacks=[data, keep], **options,
    )  # fmt: skip
    with reported():
        trainer.fit(model, data, ckpt_path=args.resume)
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
