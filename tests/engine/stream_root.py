"""A dataset directory of small synthetic images, its feed, and `RankInfo` without a process group."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sa1b import Batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import DataConfig
from sa1b.engine.step.feed import Feed
from sa1b.sam.interactive import Interactive
from sa1b.sam.targets import Targets
from tests.train.command import make_root

IMAGE_SIZE = 64
__all__ = ["IMAGE_SIZE", "Micro", "feed_of", "make_root", "place_of", "prepared"]


@dataclass(frozen=True)
class Micro:
    """A batch, and SAM's results for it."""

    batch: Batch
    images: Tensor
    targets: Targets
    image_keys: Tensor


def prepared(batch: Batch, seed: int = 3) -> Micro:
    return Micro(batch, *Interactive.inputs(None, batch, seed))


def place_of(rank: int = 0, world_size: int = 1) -> RankInfo:
    return RankInfo(rank, world_size, rank, torch.device("cpu"))


def feed_of(root: Path, out: Path, rank: int = 0, world_size: int = 1, *, seed: int = 3, **data: Any) -> Feed:
    settings = {"global_batch": 5, "masks": 4, "flip": 0.5, "threads": 1, **data}
    order = settings.pop("order", "shuffle")
    return Feed(
        DataConfig(str(root), **settings), IMAGE_SIZE, place_of(rank, world_size), out, seed, order=order
    )
