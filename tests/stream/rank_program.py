"""The program of the ranks in test_torchrun.py: reads a rank's part in several ways and records the batches.

python -m torch.distributed.run --nproc_per_node=2 -m tests.stream.rank_program ROOT OUT
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import sa1b
from tests.stream.recorded import RECIPE, digest

STEP = {"global_batch": 7, "micro_batch": 2}
COUNT = 17  # batches; in the middle of a step and in the second or third epoch


def read(root: str, workers: int | None) -> list[dict[str, Any]]:
    """The rank's first batches; if `workers` is None, from sa1b.Loader."""
    stream = sa1b.Stream(root, epochs=None, damage_log=Path(root) / "damage_log.jsonl", **STEP, **RECIPE)
    loader: Any = (
        sa1b.Loader(stream, threads=2, quiet=True)
        if workers is None
        else DataLoader(stream, batch_size=None, num_workers=workers)
    )
    return [
        {"ids": batch.ids.tolist(), "position": batch.position, "digest": digest(batch)}
        for batch in islice(loader, COUNT)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, out = sys.argv[1:]
    seen = {"0, by torchrun's variables": read(root, 0)}
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    for workers in (0, 1, 2, None):
        seen["Loader" if workers is None else str(workers)] = read(root, workers)
        dist.barrier()
    (Path(out) / f"{rank} of {world_size}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
