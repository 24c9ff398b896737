"""Steps whose loss or gradient is not finite: skipped by all ranks together and logged, up to a limit."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor

from sa1b.arguments import Range, check_fields
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.control import Control
from sa1b.errors import Sa1bError
from sa1b.storage.atomic import append_line


class HealthError(Sa1bError):
    """Too many consecutive steps were not finite to continue training."""


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Handling of losses that are not finite, and of ranks that hang.

    If a loss is not finite, all ranks skip the step, and the images are logged.

    Attributes:
        patience: Number of consecutive steps with a loss or gradient that is not finite after which the run
            still continues. With fp16, overflows, after which the scaler lowers its scale, count as well.
        stall: Seconds without progress after which a report names the rank that hangs, where it is and what
            it reads, and each rank writes its stacks to RUN/stacks-<rank>.txt. The run is not ended. By
            default two thirds of --parallel.timeout, or of --parallel.timeout-first in the first
            step. 0: no report.
    """

    patience: Annotated[int, Range(0)] = 20
    stall: Annotated[float | None, Range(0, unit=" seconds")] = None

    def __post_init__(self) -> None:
        check_fields(self, "health")


class Health:
    """Decides, on all ranks alike, whether steps are taken; `control` gets failed writes of its log."""

    def __init__(self, config: HealthConfig, run: Path, rank_info: RankInfo, control: Control) -> None:
        self.path = run / "not-finite.jsonl"
        self.skipped = 0
        self.lost = 0  # last consecutive steps without a finite loss; the weights may be bad
        self._config = config
        self._rank_info = rank_info
        self._control = control
        self._in_row = 0

    def is_good(self, step: int, loss: float, norm: float, own_loss: float, ids: list[Tensor]) -> bool:
        """Decide whether the optimizer may take the step, counted from 1 as in metrics.jsonl.

        Loss and norm are over all ranks. A rank whose own loss is not finite logs its image ids, int64 [B]
        for each micro-batch. HealthError: too many consecutive steps were not finite.
        """
        self.lost = 0 if math.isfinite(loss) else self.lost + 1
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_row = 0
            return True
        self.skipped += 1
        self._in_row += 1
        if not math.isfinite(own_loss):
            line = {
                "step": step,
                "rank": self._rank_info.rank,
                "loss": str(own_loss),
                "image_ids": [image_id for micro in ids for image_id in micro.tolist()],
            }
            self._control.write(self.path, lambda: append_line(self.path, json.dumps(line)))
        if self._in_row > self._config.patience:
            raise self._error(self._in_row, step, f"loss {loss}, gradient norm {norm}")
        return False

    def end(self, step: int) -> None:
        """Check the last steps at the end of a run or of a part; HealthError: they had no finite loss."""
        if self.lost:
            raise self._error(self.lost, step, "loss")

    def _error(self, steps: int, step: int, what: str) -> HealthError:
        return HealthError(
            f"step {step}: the last {steps} steps had a loss or gradient that is not finite ({what}); lower "
            "--optim.lr, or pass --parallel.precision bf16 in place of fp16, and start the command again: it "
            "resumes from the newest checkpoint, which is older. If it fails again at once, move the folder "
            f"of that checkpoint away. Images whose loss was not finite are listed in {self.path}"
        )
