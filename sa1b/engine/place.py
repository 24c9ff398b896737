"""Where a process stands among the ranks of a run."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Place:
    """One rank.

    Attributes:
        rank: of `world` ranks.
        local_rank: on its machine; the number of its GPU.
        device: with its index, for a GPU.
        mesh: FSDP only: ranks by "shard", or by "replicate" and "shard", in the order of their numbers.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        """Number of ranks that one copy of the model is spread over."""
        return self.mesh["shard"].size() if self.mesh else 1
