"""ZeRO-1: as DDP, but each rank keeps and updates the optimizer state of a share of the parameters."""

from typing import Any, cast

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from sa1b.engine.ranks.parallel import Ddp


class Zero1Optimizer(ZeroRedundancyOptimizer):
    """AdamW of which each rank has a part (`optim.Sharded`); created by all ranks together."""

    waits = ("_sync_params",)

    def send_weights(self) -> None:
        cast(Any, self)._sync_params()


class Zero1(Ddp):
    """--parallel.mode zero1."""

    def optimizer(self, groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
        # The weights become views of one tensor for each rank, so that each rank sends its share at once.
        return Zero1Optimizer(groups, AdamW, parameters_as_bucket_view=True, **settings)


MODE = Zero1()
