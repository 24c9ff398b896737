"""Training that runs out of memory in its third step: `python -m benchmarks.gpu.out_of_memory FILE FLAGS...`.

The time of the failure is written into FILE, in seconds since the epoch.
"""

import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sa1b import train
from sa1b.engine.step.gradients import TrainStep

_STEP = 2
_BYTES = 1 << 48  # more than any device has


def arrange(moment: Path) -> None:
    """Let the forward pass of a step allocate too much."""
    forward_backward = TrainStep.forward_backward

    def changed(self: TrainStep, batch: Any, step: int = 0, number: int = 1) -> dict[str, Tensor]:
        if step == _STEP:
            moment.write_text(str(time.time()))
            torch.empty(_BYTES, dtype=torch.uint8, device=self.rank_info.device)
        return forward_backward(self, batch, step, number)

    cast(Any, TrainStep).forward_backward = changed


if __name__ == "__main__":
    arrange(Path(sys.argv.pop(1)))
    train.exit_at_once(train.main())
