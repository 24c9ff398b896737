"""Which part of the work this process does: rank and world size, and its worker within the rank."""

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Rank of `world` ranks."""

    rank: int
    world: int


def place() -> Place:
    """From torch.distributed if it is initialised, else from torchrun's variables, else one process.

    Raises:
        ValueError: RANK and WORLD_SIZE do not fit each other.
    """
    # torch.distributed cannot be initialised if nobody imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size())
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world} do not fit; torchrun sets both")
    return Place(rank, world)
