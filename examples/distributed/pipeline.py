"""How long do the stages of a pipeline wait for each other, and what does 1F1B change?

    torchrun --nproc_per_node=2 examples/distributed/pipeline.py shards --micro-batches 2 4 8

Each rank has some blocks of SAM's image encoder, which learns the mean colour of each patch. Micro-batches
pass through all ranks. While the first ones reach the last of S stages and the last ones leave it, the others
wait: (S - 1) / (M + S - 1) of a step of M micro-batches, if stages take equal time. GPipe (Huang et al. 2019)
keeps the activations of M micro-batches, 1F1B (Narayanan et al. 2019) of at most S; they wait equally long.
Gradients are compared with those of the whole encoder.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import sa1b
from sa1b.console import reported
from sa1b.sam.model import PRESETS, Sam


class Blocks(nn.Module):
    """Blocks of the encoder; the first stage has the embedding too, the last one the head."""

    def __init__(self, encoder: Any, head: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.first = encoder.patch_embed if start == 0 else None
        self.positions = encoder.pos_embed if start == 0 else None
        self.blocks = encoder.blocks[start:stop]
        self.head = nn.Sequential(encoder.neck, head) if stop == len(encoder.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x) + self.positions
        for block in self.blocks:
            x = block(x, None)
        return x if self.head is None else self.head(x.permute(0, 3, 1, 2))


class Stage(PipelineStage):
    """Measures its own work, and the largest number of micro-batches whose activations it has."""

    seconds, held, most = 0.0, 0, 0

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        return self._measured(1, super().forward_one_chunk, *arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        return self._measured(-1, super().backward_one_chunk, *arguments, **options)

    def _measured(self, change: int, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments, **options)
        self.seconds, self.held = self.seconds + time.perf_counter() - start, self.held + change
        self.most = max(self.most, self.held)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8], help="M (2 4 8)")
    parser.add_argument("--batch", type=int, default=8, help="images of a step (8)")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # on GPUs: nccl, and a device for each rank
    rank, stages, size = dist.get_rank(), dist.get_world_size(), 256
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = replace(PRESETS["tiny"], image_size=size)
    encoder, head = Sam(config).image_encoder, nn.Conv2d(config.channels, 3, 1)
    ends = [config.depth * number // stages for number in range(stages + 1)]
    stream = sa1b.Stream(args.root, global_batch=args.batch, image_size=size, masks=1, rank=0, world_size=1)
    pixels = next(iter(stream)).images.float() / 255
    colours = functional.avg_pool2d(pixels, config.patch_size)
    expected = functional.mse_loss(Blocks(encoder, head, 0, config.depth)(pixels), colours)
    expected.backward()
    own = Blocks(encoder, head, ends[rank], ends[rank + 1])  # with the gradients of the whole encoder
    if rank == 0:
        print(f"{(__doc__ or '').splitlines()[0]}\n{stages} stages; formula: (S - 1) / (M + S - 1)")
        print("schedule M  waits  formula  activations  step, s      loss     whole  gradients")
    for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        for count in args.micro_batches:
            module = copy.deepcopy(own)
            stage = Stage(module, rank, stages, torch.device("cpu"))
            runner, best = schedule(stage, count, loss_fn=functional.mse_loss), (0.0, 1.0)
            for _ in range(4):  # the step with the shortest waits counts
                module.zero_grad()
                dist.barrier()
                losses, stage.seconds, start = [], 0.0, time.perf_counter()
                runner.step(*([pixels] if rank == 0 else []), target=colours, losses=losses)
                dist.barrier()
                best = max(best, (stage.seconds / (step := time.perf_counter() - start), step))
            pairs = zip(module.parameters(), own.parameters(), strict=True)
            error = max((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-6) for a, b in pairs)
            loss = sum(losses).item() / count if losses else 0.0
            shown = torch.tensor([loss, 1 - best[0], stage.most, error])
            ranks = [torch.empty_like(shown) for _ in range(stages)]
            dist.all_gather(ranks, shown)
            if rank == 0:
                formula, largest = (stages - 1) / (count + stages - 1), torch.stack(ranks).max(dim=0).values
                waits = float(sum(each[1] for each in ranks) / stages)
                print(
                    f"{name:5} {count:3} {waits:7.0%} {formula:8.0%} {int(largest[2]):12} {best[1]:8.3f} "
                    f"{float(ranks[-1][0]):9.6f} {expected.item():9.6f} {float(largest[3]):11.0e}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main()
