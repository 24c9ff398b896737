"""The data loader of a trainer like torchtitan's: batches, state_dict and load_state_dict.

    python examples/torchtitan_dataloader.py shards --steps 3
    torchrun --nproc_per_node=2 examples/torchtitan_dataloader.py shards --steps 6      # resumes after step 3
    python examples/torchtitan_dataloader.py shards --steps 9 --workers 2 --out runs/workers

torch.distributed.checkpoint saves every object that has both methods, as a sa1b.Loader has: its state is the
same on all ranks and fits any number of them. With --workers, torchdata's StatefulDataLoader reads the stream
in worker processes; its state belongs to a rank and resumes with the same number of ranks and workers.
"""

import argparse
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.recipe import Recipe


class Dataloader:
    """An endless sequence of batches, in the form of torchtitan's `BaseDataLoader`."""

    def __init__(
        self, root: str, batch: int, size: int, workers: int, dp_rank: int, dp_world_size: int
    ) -> None:
        stream = sa1b.Stream(
            root, global_batch=batch, image_size=size, masks=8, flip=0.5, epochs=None,
            rank=dp_rank, world_size=dp_world_size,
        )  # fmt: skip
        self.key = f"dp_rank_{dp_rank}" if workers else "all ranks"
        self.mask_size = size // 4
        if workers:
            from torchdata.stateful_dataloader import StatefulDataLoader

            self.loader: Any = StatefulDataLoader(stream, batch_size=None, num_workers=workers)
        else:
            self.loader = sa1b.Loader(stream, dense=self.mask_size, quiet=True)

    def __iter__(self) -> Iterator[sa1b.Batch]:
        for batch in self.loader:
            # Workers send masks as run lengths.
            yield (
                batch if batch.dense is not None else replace(batch, dense=batch.masks.dense(self.mask_size))
            )

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps(self.loader.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(pickle.loads(state[self.key]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of the run, those before a resume included"
    )
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all ranks")
    parser.add_argument("--image-size", type=int, default=256, help="pixels of the padded square")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of each rank")
    parser.add_argument("--out", default="runs/titan", help="folder of the checkpoints")
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")  # on GPUs: nccl, and a device for each rank

    torch.manual_seed(0)
    model = Interactive(
        Sam(replace(PRESETS["tiny"], image_size=args.image_size)), Recipe(clicks=1, unprompted=0)
    )
    if world_size > 1:
        fully_shard(model)
    dataloader = Dataloader(args.root, args.batch, args.image_size, args.workers, rank, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def states() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "dataloader": dataloader}

    out = Path(args.out)
    done = max([int(path.name.removeprefix("step-")) for path in out.glob("step-*")], default=0)
    if done:
        found = states()
        dcp.load(found, checkpoint_id=out / f"step-{done}")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for step, batch in zip(range(done, args.steps), dataloader, strict=False):
        sums = model(*model.inputs(batch, seed=0))
        total = torch.stack((sums["loss"], sums["count"])).detach()
        if world_size > 1:
            dist.all_reduce(total)
        # The mean over the masks of all ranks: FSDP divides the gradients by the number of ranks.
        (sums["loss"] * world_size / total[1].clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = total[0] / total[1].clamp(min=1)
        print(f"step {step + 1}: rank {rank}: images {batch.ids.tolist()}, loss {loss:.6f}", flush=True)
    if done < args.steps:
        dcp.save(states(), checkpoint_id=out / f"step-{args.steps}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main()
