"""Train a small SAM with Lightning, with validation on a held-out view after every epoch.

    sa1b view shards --held-out 20% --name train
    sa1b view shards --held-out 20% --split held-out --name held-out
    python examples/lightning.py shards --epochs 3               # --devices 2: two processes
    python examples/lightning.py shards --epochs 5 --resume runs/lightning/last.ckpt
The first two commands make the views.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

# Python must not search this folder: this file has the name of the package that it imports.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

from torch import Tensor, optim

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe

with reported("examples"):
    import lightning


class Training(lightning.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.root, self.size = args.root, args.image_size
        self.sam = Interactive(Sam(replace(PRESETS["tiny"], image_size=args.image_size)), Recipe(clicks=1))

    def _loader(self, view: str, **options: object) -> sa1b.Loader:
        stream = sa1b.Stream(self.root, view=view, global_batch=4, image_size=self.size, masks=8, **options)
        return sa1b.Loader(stream, device=self.device, dense=self.size // 4, quiet=True)

    def train_dataloader(self) -> sa1b.Loader:
        return self._loader("train", flip=0.5)  # the Loader itself, whose position is saved

    def on_train_epoch_start(self) -> None:  # not called where Lightning resumes within an epoch
        self.trainer.train_dataloader.set_epoch(self.current_epoch)

    def val_dataloader(self) -> sa1b.Loader:
        return self._loader("held-out", order="sequential")  # each iteration is every image once

    def training_step(self, batch: sa1b.Batch, index: int) -> Tensor:
        sums = self.sam(*self.sam.inputs(batch, seed=0))
        loss = sums["loss"] / sums["count"].clamp(min=1)  # a rank's last micro-batch may be empty
        self.log("loss", loss.detach(), True, batch_size=4)
        return loss

    def validation_step(self, batch: sa1b.Batch, index: int) -> None:
        inputs = self.sam.inputs(batch, seed=0)
        found = self.sam(*inputs, evaluate=True)  # after 1, 3 and 5 clicks and for the box
        iou = (found["intersections"] / found["unions"].clamp(min=1))[inputs[1].weights > 0, 0]
        self.log("iou", iou.sum() / max(len(iou), 1), True, batch_size=max(len(iou), 1), sync_dist=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW(self.parameters(), 1e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("root", help="folder that sa1b reshard made, with the views train and held-out")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--image-size", type=int, default=256, help="pixels of the padded square")
parser.add_argument("--devices", type=int, default=1, help="processes, each with a GPU if there are any")
parser.add_argument("--resume", help="checkpoint; the position of the stream is in it")

if __name__ == "__main__":
    args = parser.parse_args()
    options = {"use_distributed_sampler": False, "logger": False}  # the stream divides the data over ranks
    keep = lightning.pytorch.callbacks.ModelCheckpoint("runs/lightning", save_last=True)
    trainer = lightning.Trainer(max_epochs=args.epochs, devices=args.devices, callbacks=[keep], **options)
    with reported():
        trainer.fit(Training(args), ckpt_path=args.resume)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
