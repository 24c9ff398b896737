"""A root of small synthetic images, its feed, and places of ranks that need no process group."""

from pathlib import Path
from typing import Any

import torch

from sa1b.engine.feed import DataConfig, Feed
from sa1b.engine.ranks import RankInfo
from tests.train.command import make_root

IMAGE_SIZE = 64
__all__ = ["IMAGE_SIZE", "feed_of", "make_root", "place_of"]


def place_of(rank: int = 0, world_size: int = 1) -> RankInfo:
    return RankInfo(rank, world_size, rank, torch.device("cpu"))


def feed_of(root: Path, out: Path, rank: int = 0, world_size: int = 1, *, seed: int = 3, **data: Any) -> Feed:
    settings = {"global_batch": 5, "masks": 4, "flip": 0.5, "threads": 1, **data}
    order = settings.pop("order", "shuffle")
    return Feed(
        DataConfig(str(root), **settings), IMAGE_SIZE, place_of(rank, world_size), out, seed, order=order
    )
